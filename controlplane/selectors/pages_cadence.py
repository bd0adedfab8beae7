"""Reads for the pages: where a lane's cadence stands, what its next window holds, how its slots went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from statistics import median
from typing import Any

from django.db import connection
from django.db.models import Count, Min, QuerySet

from controlplane.errors import NotFound
from controlplane.models import (
    CadenceSlot,
    Generation,
    Lane,
    Project,
    Release,
    Rubric,
    ServedVersion,
    SignalDefinition,
    TaskSet,
)
from controlplane.selectors.feedback_health import signals_matured
from controlplane.services.cadence import Rhythm, cadence_of, rhythm_of
from controlplane.services.clock import database_now
from controlplane.services.slots import slot_open, window_began
from controlplane.services.windows import Window, window_collect
from controlplane.states import Arm, ReleaseState, SlotState
from rl_core.shipping.freezes import frozen_at, thaws_at
from rl_core.shipping.specs import CadenceSpec, CanarySpec, DateFreeze, Freeze, OnceFreeze, WeeklyFreeze

SLOTS = 50
DAY = timedelta(days=1)
# A lane without a cadence gates by hand: no shadow, no canary.
BY_HAND = CadenceSpec(canary=CanarySpec(steps=()))
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
# What was said of the version that answers, by who sent it; the newest week.
_MIX = """
SELECT f.sender, count(*) FROM controlplane_feedback f
JOIN controlplane_generation g ON g.id = f.generation_id
WHERE g.lane_id = %(lane)s AND g.version_id = %(version)s AND f.state = 'joined' AND g.created_at > now() - %(back)s
GROUP BY f.sender ORDER BY count(*) DESC, f.sender
"""


class LaneMood(StrEnum):
    """What a lane's cadence does now, in one word."""

    ROLLING_BACK = "rolling_back"
    HELD = "held"
    PAUSED = "paused"
    FROZEN = "frozen"
    BY_HAND = "by_hand"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """How the newest slots and releases went. Rates are None before anything ended."""

    ended: int
    skipped: int
    reasons: list[tuple[str, int]]
    met_users: int
    rolled_back: int
    detection_s: float | None

    @property
    def skip_rate(self) -> float | None:
        """The share of ended slots that brought no decision."""
        return self.skipped / self.ended if self.ended else None

    @property
    def rollback_rate(self) -> float | None:
        """The share of releases which users met that were taken back."""
        return self.rolled_back / self.met_users if self.met_users else None


@dataclass(frozen=True, slots=True)
class SlotHistory:
    """The newest slots, the newest first, and how they went."""

    slots: list[CadenceSlot]
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class CadenceView:
    """What the head of a lane's page shows. `spec` is the default one for a lane that has none."""

    lane: Lane
    spec: CadenceSpec
    configured: bool
    rhythm: Rhythm
    mood: LaneMood
    why: str
    next_at: datetime | None
    slot: CadenceSlot | None
    history: SlotHistory
    freezes: list[str]


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the next window holds so far. `window` is None before a signal map is published."""

    window: Window | None
    matured: int
    minimum: int
    mix: list[tuple[str, int]]
    lags: list[tuple[int, int]]
    left_out: list[tuple[str, int]] = field(default_factory=list)

    @property
    def mixed(self) -> int:
        """Events in the mix."""
        return sum(count for _, count in self.mix)

    @property
    def lagging(self) -> int:
        """Answers of the last day."""
        return sum(count for _, count in self.lags)


def cadence_view(lane: Lane) -> CadenceView:
    """Everything about the lane's rhythm, as of now."""
    configured = cadence_of(lane)
    spec = configured or BY_HAND
    now = database_now()
    rhythm = rhythm_of(lane, spec, now=now)
    mood, why = lane_mood(lane, spec, now=now)
    return CadenceView(
        lane=lane,
        spec=spec,
        configured=configured is not None,
        rhythm=rhythm,
        mood=mood,
        why=why,
        next_at=lane.next_slot_at if mood in (LaneMood.RUNNING, LaneMood.FROZEN) else None,
        slot=slot_open(lane),
        history=slot_history(lane),
        freezes=[freeze_text(freeze) for freeze in spec.freezes],
    )


def slot_history(lane: Lane) -> SlotHistory:
    """What became of the lane's slots."""
    slots = list(lane.cadence_slots.select_related("run", "release__version").order_by("-number")[:SLOTS])
    return SlotHistory(slots, _record(lane, slots))


def lane_mood(lane: Lane, spec: CadenceSpec, *, now: datetime) -> tuple[LaneMood, str]:
    """What the lane's cadence does now, and why or until when."""
    if lane.rollback_to_id is not None:
        return LaneMood.ROLLING_BACK, "to an earlier version, as soon as a replica holds it"
    if lane.hold_reason:
        return LaneMood.HELD, f"{lane.hold_reason}: it goes on once that is resolved"
    if lane.paused_at is not None:
        return LaneMood.PAUSED, "no slot opens until somebody resumes it"
    if spec.freezes and frozen_at(spec, now) is not None:
        return LaneMood.FROZEN, f"until {thaws_at(spec, now):%Y-%m-%d %H:%M} UTC"
    if spec.interval_s <= 0:
        return LaneMood.BY_HAND, "no interval is set: slots open by hand alone"
    return LaneMood.RUNNING, ""


def freeze_text(freeze: Freeze) -> str:
    """A freeze as the settings form writes it, one a line."""
    if isinstance(freeze, DateFreeze):
        return f"date {freeze.date.isoformat()}"
    if isinstance(freeze, OnceFreeze):
        return f"once {freeze.start.isoformat()} {freeze.end.isoformat()}"
    assert isinstance(freeze, WeeklyFreeze)
    days = ",".join(_DAYS[day] for day in sorted(set(freeze.days)))
    return f"weekly {days} {freeze.start}-{freeze.end}"


def _record(lane: Lane, slots: list[CadenceSlot]) -> SlotRecord:
    ended = [slot for slot in slots if slot.state in (SlotState.DONE, SlotState.SKIPPED)]
    skipped = [slot for slot in ended if slot.state == SlotState.SKIPPED]
    reasons = Counter(slot.reason.split(":")[0] or "no reason" for slot in skipped)
    back = Release.objects.filter(lane=lane, state=ReleaseState.ROLLED_BACK)
    promoted = Release.objects.filter(lane=lane, state=ReleaseState.PROMOTED).count()
    rolled = list(back.annotate(met=Min("steps__created_at")).order_by("-created_at")[:SLOTS])
    times = [
        (release.finished_at - began).total_seconds()
        for release in rolled
        if release.finished_at and (began := release.promoted_at or release.met)
    ]
    return SlotRecord(
        ended=len(ended),
        skipped=len(skipped),
        reasons=reasons.most_common(5),
        met_users=promoted + len(rolled),
        rolled_back=len(rolled),
        detection_s=median(times) if times else None,
    )


def readiness_of(lane: Lane) -> Readiness:
    """What the next window would be trained on, and how fresh the lane's answers are."""
    spec = cadence_of(lane) or CadenceSpec()
    window = _window(lane)
    left_out = sorted(window.left_out.items(), key=lambda pair: -pair[1]) if window else []
    since = window_began(lane, slot_open(lane))
    return Readiness(
        window=window,
        matured=signals_matured(lane=lane, since=since, horizon_s=spec.horizon_s),
        minimum=spec.minimum_signals,
        mix=_mix(lane),
        lags=_lags(lane),
        left_out=[(str(reason), count) for reason, count in left_out],
    )


def _window(lane: Lane) -> Window | None:
    try:
        return window_collect(lane=lane)
    except NotFound:
        return None


def _mix(lane: Lane) -> list[tuple[str, int]]:
    values: dict[str, Any] = {"lane": lane.pk, "version": lane.promoted_version_id, "back": timedelta(days=7)}
    with connection.cursor() as cursor:
        cursor.execute(_MIX, values)
        return [(str(sender), int(count)) for sender, count in cursor.fetchall()]


def _lags(lane: Lane) -> list[tuple[int, int]]:
    """Answers of the last day by how many promotions ago their version answered first: 0 is on policy.

    A candidate that answers a canary is newer, which is counted as -1.
    """
    counts = dict(
        Generation.objects.filter(lane=lane, created_at__gt=database_now() - DAY)
        .values_list("version")
        .annotate(count=Count("id"))
        .order_by()
    )
    served = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED).order_by("-created_at")
    order: list[Any] = list(dict.fromkeys(served.values_list("version_id", flat=True)[:SLOTS]))
    lags: Counter[int] = Counter()
    for version_id, count in counts.items():
        lags[order.index(version_id) if version_id in order else -1] += count
    return sorted(lags.items())


@dataclass(frozen=True, slots=True)
class SettingsChoices:
    """What a cadence's settings can name in a project."""

    task_sets: list[str]
    rubrics: list[str]
    signals: list[str]


def settings_choices(project: Project) -> SettingsChoices:
    """Names, sorted."""

    def names(rows: QuerySet[Any]) -> list[str]:
        return sorted(set(rows.values_list("slug", flat=True)))

    return SettingsChoices(
        task_sets=names(TaskSet.objects.filter(project=project)),
        rubrics=names(Rubric.objects.filter(project=project)),
        signals=names(SignalDefinition.objects.filter(project=project)),
    )
