"""What the conductor does for lanes: releases one step on, looks at canaries, slots of cadences, monitors.

Each lane and release by itself: one that cannot move must not hold up the others.
"""

from __future__ import annotations

from functools import partial

from django.db.models import QuerySet

from controlplane.conductor.looks import Looks
from controlplane.models import Project, Release, WorkUnit
from controlplane.services.canaries import canary_advance, canary_begin
from controlplane.services.events import CONDUCTOR
from controlplane.services.gating import GateVerdict, gate_begin, gate_judge
from controlplane.services.monitors import lane_watch, lanes_watched, project_watch
from controlplane.services.promotions import lane_rollback_finish, lanes_rolling_back, release_promote_itself
from controlplane.services.releases import release_spec
from controlplane.services.shadows import shadow_begin, shadow_conclude, shadow_lost
from controlplane.services.slots import lanes_with_slots, slots_advance
from controlplane.states import CanaryVerdict, EvaluationState, ReleaseState, WorkKind, WorkState

MOVING = (ReleaseState.PENDING, ReleaseState.GATING, ReleaseState.SHADOW)
_OPEN_EVALUATION = (EvaluationState.PENDING, EvaluationState.RUNNING)
_rollbacks, _slots, _releases = Looks("rollback"), Looks("slot of lane"), Looks("release")
_canaries, _monitors = Looks("canary"), Looks("monitors")


def advance_lanes() -> None:
    """Rollbacks that wait for their version, then every lane's slot, then every release."""
    for lane in lanes_rolling_back():
        _rollbacks.at(lane.pk, partial(lane_rollback_finish, lane=lane))
    for lane in lanes_with_slots():
        _slots.at(lane.pk, partial(slots_advance, lane=lane))
    for release in releases_moving():
        _releases.at(release.pk, partial(release_advance, release=release))


def look_at_canaries() -> None:
    """Every candidate that users meet, paused or not, is looked at and judged."""
    rows = _rows().filter(state__in=[ReleaseState.CANARY, ReleaseState.PAUSED], steps__ended_at__isnull=True)
    for release in rows.distinct():
        _canaries.at(release.pk, partial(canary_advance, release=release))


def watch_lanes() -> None:
    """The monitors of every lane and project."""
    for lane in lanes_watched():
        _monitors.at(lane.pk, partial(lane_watch, lane))
    for project in Project.objects.filter(lanes__isnull=False).distinct():
        _monitors.at(project.pk, partial(project_watch, project))


def releases_moving() -> list[Release]:
    """Releases that an automatic step may move."""
    return list(_rows().filter(state__in=MOVING).order_by("created_at"))


def release_advance(*, release: Release) -> Release:
    """Take the release's next automatic step before the canary; nothing while it waits for work or a person.

    Raises: Conflict while what it needs is not there yet.
    """
    if release.state == ReleaseState.PENDING:
        return gate_begin(release=release, actor=CONDUCTOR)
    if release.state == ReleaseState.GATING and not release.gate:
        evaluations = (release.candidate_evaluation, release.incumbent_evaluation)
        waits = any(row is None or row.state in _OPEN_EVALUATION for row in evaluations)
        return release if waits else gate_judge(release=release, actor=CONDUCTOR)
    if release.state == ReleaseState.GATING and release.gate.get("verdict") == GateVerdict.PASS:
        if release_spec(release).shadow.prompts:
            return shadow_begin(release=release, actor=CONDUCTOR)
        return _after_shadow(release)
    if release.state == ReleaseState.SHADOW:
        return _through_shadow(release)
    return release


def _through_shadow(release: Release) -> Release:
    verdict = release.shadow.get("verdict")
    if verdict is None:
        unit = WorkUnit.objects.filter(kind=WorkKind.SHADOW, ref=release.pk, state=WorkState.DEAD).first()
        lost = f"its replay died: {unit.error}" if unit else ""
        return shadow_lost(release=release, actor=CONDUCTOR, reason=lost) if unit else release
    if verdict in (CanaryVerdict.FAIL, CanaryVerdict.UNDECIDED):
        return shadow_conclude(release=release, actor=CONDUCTOR)
    return _after_shadow(release)


def _after_shadow(release: Release) -> Release:
    """The canary; without one the release waits for people, or is promoted by itself."""
    spec = release_spec(release)
    if spec.canary.steps:
        return canary_begin(release=release, actor=CONDUCTOR)
    return release_promote_itself(release=release) if spec.auto_promote else release


def _rows() -> QuerySet[Release]:
    rows = Release.objects.select_related("lane__cluster", "lane__project", "lane__promoted_version", "run")
    return rows.select_related("version", "incumbent", "candidate_evaluation", "incumbent_evaluation")
