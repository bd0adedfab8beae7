"""Reads for the pages: one release with all that it went through, and the line of versions that a lane served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from django.db.models import Q, QuerySet

from controlplane.models import CanaryStep, Event, Lane, PolicyVersion, Release, ServedVersion, SignalMap
from controlplane.services.events import lane_topic
from controlplane.services.releases import release_spec, seen_by_users
from controlplane.states import Arm, EventType
from rl_core.shipping.specs import CadenceSpec, Direction, MetricRole, MetricSpec

LINE = 30
HISTORY = 200
HISTORY_KINDS = (EventType.RELEASE_CHANGED, EventType.RELEASE_APPROVED, EventType.CANARY_ANALYSED)


class Finding(StrEnum):
    """What an interval says of a difference that may be as bad as its margin."""

    BETTER = "better"
    NO_WORSE = "no worse"
    OPEN = "open"
    WORSE = "worse"
    NO_DATA = "no data"


@dataclass(frozen=True, slots=True)
class EffectRow:
    """One comparison as tables and forest plots show it. `sign` is 1 when more is better, -1 when less is."""

    name: str
    role: str
    sign: int
    margin: float
    difference: float | None
    low: float | None
    high: float | None
    incumbent: float | None = None
    candidate: float | None = None
    n_incumbent: int = 0
    n_candidate: int = 0

    @property
    def finding(self) -> Finding:
        """In the metric's good direction."""
        if self.low is None or self.high is None:
            return Finding.NO_DATA
        low, high = (self.low, self.high) if self.sign > 0 else (-self.high, -self.low)
        if high < -self.margin:
            return Finding.WORSE
        if low > 0:
            return Finding.BETTER
        return Finding.NO_WORSE if low > -self.margin else Finding.OPEN


@dataclass(frozen=True, slots=True)
class Exposure:
    """How many users a step brought to each arm."""

    position: int
    share: float
    promoted: int
    canary: int


@dataclass(frozen=True, slots=True)
class ReleaseView:
    """All that is shown of a release."""

    release: Release
    spec: CadenceSpec
    seen: bool
    gate: EffectRow | None
    shadow: list[EffectRow]
    steps: list[CanaryStep]
    step: CanaryStep | None
    effects: list[EffectRow]
    exposures: list[Exposure]
    sample_ratio_p: float | None
    looked: CanaryStep | None
    reasons: list[str]
    matured: dict[str, int]
    deadline_at: datetime | None

    @property
    def held_until(self) -> datetime | None:
        """When the present step may end at the earliest."""
        if self.step is None:
            return None
        return self.step.created_at + timedelta(seconds=self.spec.canary.hold_s)

    @property
    def ratio_broken(self) -> bool:
        """Whether the arms' sizes do not fit their shares."""
        return self.sample_ratio_p is not None and self.sample_ratio_p <= self.spec.canary.sample_ratio_alpha

    @property
    def fewest_matured(self) -> int:
        """Users of the smaller arm in the present step whose outcomes are complete."""
        return min((self.matured.get(arm.value, 0) for arm in Arm), default=0)


def releases_of(query: Q) -> QuerySet[Release]:
    """Releases with everything that pages show of them, the newest first."""
    rows = Release.objects.filter(query).select_related(
        "version",
        "incumbent",
        "proposer",
        "run",
        "lane__cluster",
        "lane__promoted_version",
        "lane__project",
        "candidate_evaluation__task_set",
        "candidate_evaluation__rubric_version__rubric",
    )
    return rows.prefetch_related("approvals__user", "steps", "cadence_slots").order_by("-created_at")


def release_view(release: Release) -> ReleaseView:
    """The release, which comes from `releases_of`."""
    spec = release_spec(release)
    steps = sorted(release.steps.all(), key=lambda step: step.position)
    looked = next((step for step in reversed(steps) if step.analysis), None)
    analysis: dict[str, Any] = looked.analysis if looked else {}
    effects = analysis.get("effects", {})
    slot = next(iter(release.cadence_slots.all()), None)
    return ReleaseView(
        release=release,
        spec=spec,
        seen=seen_by_users(release),
        gate=_gate_row(release.gate),
        shadow=_shadow_rows(release.shadow, spec.shadow.margin),
        steps=steps,
        step=next((step for step in steps if step.ended_at is None), None),
        effects=[_effect_row(metric, effects.get(metric.name, {})) for metric in spec.canary.metrics],
        exposures=[Exposure(*row) for row in analysis.get("exposures", [])],
        sample_ratio_p=analysis.get("sample_ratio_p"),
        looked=looked,
        reasons=list(analysis.get("reasons", [])),
        matured=dict(analysis.get("matured", {})),
        deadline_at=slot.deadline_at if slot else None,
    )


def _effect_row(metric: MetricSpec, found: dict[str, Any]) -> EffectRow:
    return EffectRow(
        name=metric.name,
        role=metric.role.value,
        sign=1 if metric.direction is Direction.HIGHER else -1,
        margin=metric.margin,
        difference=found.get("difference"),
        low=found.get("low"),
        high=found.get("high"),
        incumbent=found.get("mean_promoted"),
        candidate=found.get("mean_canary"),
        n_incumbent=found.get("n_promoted", 0),
        n_candidate=found.get("n_canary", 0),
    )


def _gate_row(gate: dict[str, Any]) -> EffectRow | None:
    if not gate.get("verdict"):
        return None
    return EffectRow(
        name="held-out reward",
        role=MetricRole.GOAL.value,
        sign=1,
        margin=gate.get("margin", 0.0),
        difference=gate.get("difference"),
        low=gate.get("low"),
        high=gate.get("high"),
        incumbent=gate.get("incumbent_mean"),
        candidate=gate.get("candidate_mean"),
        n_incumbent=gate.get("n", 0),
        n_candidate=gate.get("n", 0),
    )


def _shadow_rows(shadow: dict[str, Any], margin: float) -> list[EffectRow]:
    """Rates must not rise; a grade must not fall; length, relative to the incumbent's, must not move far."""
    n = shadow.get("n", 0)
    return [
        EffectRow(
            name=key.replace("_", " "),
            role=MetricRole.GUARDRAIL.value,
            sign=1 if key == "rubric" else -1,
            margin=margin,
            difference=found.get("difference"),
            low=found.get("low"),
            high=found.get("high"),
            incumbent=found.get("incumbent"),
            candidate=found.get("candidate"),
            n_incumbent=n,
            n_candidate=n,
        )
        for key, found in shadow.get("effects", {}).items()
    ]


def release_history(release: Release) -> list[Event]:
    """Who did what to the release and why, the newest first."""
    rows = Event.objects.filter(
        topic_id=lane_topic(release.lane_id),
        type__in=HISTORY_KINDS,
        data__release=str(release.pk),
        at__gte=release.created_at - timedelta(minutes=1),
    )
    return list(rows.order_by("-seq")[:HISTORY])


@dataclass(frozen=True, slots=True)
class LineEntry:
    """One time that a version answered users, with where the version came from."""

    served: ServedVersion
    release: Release | None
    parent: PolicyVersion | None
    window: dict[str, Any]
    signal_map: SignalMap | None
    can_return: bool


def version_line(lane: Lane) -> list[LineEntry]:
    """What answered the lane's users, newest first: all of them, or those of a canary."""
    served = ServedVersion.objects.filter(lane=lane).select_related(
        "version__parent",
        "version__lineage__parent",
        "version__step__run",
        "release__run",
        "release__candidate_evaluation__rubric_version__rubric",
    )
    rows = list(served.order_by("-created_at", "-id")[:LINE])
    maps = list(SignalMap.objects.filter(project_id=lane.project_id).order_by("-created_at"))
    return [_entry(lane, row, maps) for row in rows]


def _entry(lane: Lane, served: ServedVersion, maps: Sequence[SignalMap]) -> LineEntry:
    version = served.version
    step = getattr(version, "step", None)
    begun = step.created_at if step is not None and step.window else None
    used = next((one for one in maps if begun is not None and one.created_at <= begun), None)
    answers_all = served.arm == Arm.PROMOTED and version.pk != lane.promoted_version_id
    return LineEntry(
        served=served,
        release=served.release if served.release and served.release.version_id == version.pk else None,
        parent=_trained_from(version),
        window=step.window if step is not None else {},
        signal_map=used,
        can_return=answers_all and version.quarantined_at is None,
    )


def _trained_from(version: PolicyVersion) -> PolicyVersion | None:
    """The version before; where that is a run's start, the version that the run started from."""
    before = version.parent
    return version.lineage.parent if before is None or before.number == 0 else before
