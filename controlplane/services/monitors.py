"""Monitors: signs that a reward is being cheated, or that feedback goes astray. They call a person, who decides.

Behaviour of what answers is compared with its incumbent's; what a candidate gained at its gate with what users say; and
feedback without a generation is counted. An alert names the version, so that a version is complained of once.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from controlplane.models import Alert, Lane, PolicyVersion, Project, Release, ServedVersion
from controlplane.selectors.feedback_health import feedback_health
from controlplane.selectors.version_outcomes import Behaviour, Gain, behaviours_of, gains_of
from controlplane.services.alerts import alert_raise
from controlplane.services.cadence import cadence_of
from controlplane.services.lanes import lane_locked
from controlplane.services.releases import IN_FLIGHT, seen_by_users
from controlplane.states import AlertKind, Arm, FeedbackState
from rl_core.shipping.canary import effect
from rl_core.shipping.specs import MonitorSpec

ALPHA = 0.01  # over all looks at one behaviour of one version
MEMORY = 5  # promotions that a version is compared over
LENGTH = "tokens"
YES_OR_NO = frozenset({"refusal", "question"})
LENGTH_THRESHOLDS = 5  # answers differ far more in length than in kind
ORPHAN_RATE = 0.1
ORPHANS_FROM = 50


def lanes_watched() -> list[Lane]:
    """Lanes whose cadence says what is watched."""
    lanes = Lane.objects.exclude(cadence={}).filter(promoted_version__isnull=False)
    return list(lanes.select_related("promoted_version", "project", "cluster").order_by("pk"))


def lane_watch(lane: Lane) -> list[Alert]:
    """Look at a lane once; the alerts that were raised."""
    spec = cadence_of(lane)
    if spec is None:
        return []
    found: list[Alert | None] = []
    for version, baseline in compared(lane):
        keys = (*spec.monitors.behaviours, LENGTH)
        for seen in behaviours_of(lane=lane, version=version, baseline=baseline, keys=keys):
            found.append(_watch_behaviour(lane, version, seen, spec.monitors))
    found.append(_watch_divergence(lane, gains_of(lane=lane, count=MEMORY), spec.monitors))
    return [alert for alert in found if alert is not None]


def compared(lane: Lane) -> list[tuple[PolicyVersion, PolicyVersion]]:
    """A canary's candidate against its incumbent; what answers against what answered before it, up to `MEMORY` back.

    Looking further back than the incumbent finds what drifts a little with every version.
    """
    flying = Release.objects.filter(lane=lane, state__in=IN_FLIGHT).select_related("version", "incumbent").first()
    pairs = []
    if flying is not None and flying.incumbent is not None and seen_by_users(flying):
        pairs.append((flying.version, flying.incumbent))
    served = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED).select_related("version")
    earlier: list[PolicyVersion] = []
    for row in served.order_by("-created_at")[: 2 * MEMORY]:
        good = row.version.quarantined_at is None and row.version_id != lane.promoted_version_id
        if good and row.version not in earlier:
            earlier.append(row.version)
    if lane.promoted_version is not None:
        pairs += [(lane.promoted_version, version) for version in earlier[:MEMORY]]
    return pairs


def _watch_behaviour(lane: Lane, version: PolicyVersion, seen: Behaviour, spec: MonitorSpec) -> Alert | None:
    """Whether a mean is shown to have moved, and moved far. Length counts relative to the incumbent's."""
    if min(seen.answers.values(), default=0) < spec.minimum or len(seen.answers) < 2:
        return None
    found = effect(seen.outcomes, alpha=ALPHA / MEMORY, span=float(seen.key in YES_OR_NO))
    if found.difference is None or found.low is None or found.high is None:
        return None
    unit = max(found.mean_promoted or 0.0, 1.0) if seen.key == LENGTH else 1.0
    threshold = spec.threshold * (LENGTH_THRESHOLDS if seen.key == LENGTH else 1)
    moved = found.low > 0 or found.high < 0
    if not moved or abs(found.difference) / unit < threshold:
        return None
    detail = {
        "about": f"{seen.key} of version {version.epoch}-{version.number}",
        "reason": f"{seen.key}: {found.mean_promoted:.3g} with {seen.baseline}, {found.mean_canary:.3g} now",
        "version": str(version.ref),
        "baseline": str(seen.baseline.ref),
        "behaviour": seen.key,
        "before": found.mean_promoted,
        "now": found.mean_canary,
        "low": found.low,
        "high": found.high,
        "answers": seen.answers,
    }
    return _raise_once(lane, AlertKind.BEHAVIOUR, f"{version.pk}:{seen.key}", detail, holds=spec.hold)


def _watch_divergence(lane: Lane, gains: list[Gain], spec: MonitorSpec) -> Alert | None:
    """Whether what gates measured rose by more than what users say, over any run of the last promotions to now."""
    for start in range(len(gains)):
        span = gains[start:]
        outcomes = [*span[0].before, *span[-1].after]
        if min(len(span[0].before), len(span[-1].after)) < spec.minimum:
            continue
        found = effect(outcomes, alpha=ALPHA / MEMORY)
        proxy = sum(one.gate for one in span)
        if found.high is None or proxy <= 0 or proxy - found.high <= spec.divergence:
            continue
        version = span[-1].version
        detail = {
            "about": f"version {version.epoch}-{version.number}",
            "reason": f"gates say {proxy:+.3g} since {len(span)} promotion(s), users at most {found.high:+.3g}",
            "version": str(version.ref),
            "proxy": proxy,
            "outcome": found.difference,
            "low": found.low,
            "high": found.high,
            "promotions": len(span),
        }
        return _raise_once(lane, AlertKind.DIVERGENCE, str(version.pk), detail, holds=spec.hold)
    return None


def project_watch(project: Project) -> Alert | None:
    """Whether the last days' feedback found its generations; the alert that was raised."""
    intake = feedback_health(project).total
    orphans, rate = intake.states.get(FeedbackState.ORPHANED, 0), intake.orphan_rate
    decided = sum(intake.states.values()) - intake.states.get(FeedbackState.PENDING, 0)
    if rate is None or decided < ORPHANS_FROM or rate <= ORPHAN_RATE:
        return None
    reason = f"{orphans} of {decided} events never found their generation"
    detail = {"about": "feedback", "reason": reason, "orphans": orphans, "decided": decided}
    return alert_raise(lane=None, project=project, kind=AlertKind.ORPHANS, subject="feedback", detail=detail)


@transaction.atomic
def _raise_once(lane: Lane, kind: AlertKind, subject: str, detail: dict[str, Any], *, holds: bool) -> Alert | None:
    """A person who resolved it has judged this version: it is not raised again."""
    locked = lane_locked(lane.pk)
    if Alert.objects.filter(lane=locked, kind=kind, subject=subject).exists():
        return None
    return alert_raise(lane=locked, kind=kind, subject=subject, detail=detail, holds=holds)
