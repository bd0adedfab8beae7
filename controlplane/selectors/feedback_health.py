"""How well feedback comes in: what finds its generation, how late, how often twice; and how much of it has matured."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection
from django.utils import timezone

from controlplane.models import Lane, Project
from controlplane.states import Consent, FeedbackState

LOOK_BACK = timedelta(days=7)
NEWEST = 20_000  # quantiles of so many events are as good as of all

# Feedback that came before its generation was written down had no delay. Late events are among them: left out, the
# quantiles could never say that a horizon is too short.
_DELAYS = """
SELECT percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY d.seconds), count(*)
FROM (
    SELECT greatest(0, extract(epoch FROM f.created_at - g.created_at)) AS seconds
    FROM controlplane_feedback f JOIN controlplane_generation g ON g.id = f.generation_id
    WHERE f.project_id = %(project)s AND f.state IN ('joined', 'late') AND f.created_at > now() - %(back)s
      AND (%(lane)s::uuid IS NULL OR g.lane_id = %(lane)s)
    ORDER BY f.created_at DESC LIMIT %(newest)s
) d
"""
_MATURED = """
SELECT count(*)
FROM controlplane_generation g
JOIN controlplane_feedback f ON f.generation_id = g.id AND f.state = %(joined)s AND f.consent = %(train)s
JOIN controlplane_signaldefinition s ON s.id = f.signal_id
WHERE g.lane_id = %(lane)s AND g.version_id = %(version)s AND g.consent = %(train)s AND g.erased_at IS NULL
  AND g.created_at > %(since)s - %(horizon)s AND g.created_at <= now() - %(horizon)s
  AND s.slug IN (
      SELECT jsonb_object_keys(m.content -> 'signals') FROM controlplane_signalmap m
      WHERE m.project_id = %(project)s AND m.number =
          (SELECT max(number) FROM controlplane_signalmap WHERE project_id = %(project)s))
"""
_STATES = """
SELECT sender, state, count(*) FROM controlplane_feedback
WHERE project_id = %(project)s AND created_at > now() - %(back)s
GROUP BY sender, state
"""
_REPEATS = """
SELECT sender, count(*), coalesce(sum(repeats), 0) FROM controlplane_feedbackreceipt
WHERE project_id = %(project)s AND id > %(from)s
GROUP BY sender
"""


@dataclass(frozen=True, slots=True)
class DelayQuantiles:
    """Seconds between an answer and the arrival of feedback on it; None before any came."""

    p50: float | None
    p95: float | None
    n: int


@dataclass(slots=True)
class Intake:
    """What came in, of one sender or of all. `repeats` are events sent again; `states` counts the rest by state."""

    received: int = 0
    repeats: int = 0
    states: dict[str, int] = field(default_factory=dict)

    @property
    def orphan_rate(self) -> float | None:
        """The share of decided events that never found their generation; None before any was decided."""
        decided = sum(self.states.values()) - self.states.get(FeedbackState.PENDING, 0)
        return self.states.get(FeedbackState.ORPHANED, 0) / decided if decided else None

    @property
    def late_rate(self) -> float | None:
        """The share of joined events that came after their horizon."""
        late = self.states.get(FeedbackState.LATE, 0)
        joined = late + self.states.get(FeedbackState.JOINED, 0)
        return late / joined if joined else None

    @property
    def duplicate_rate(self) -> float | None:
        """The share of all deliveries that repeat an earlier one."""
        deliveries = self.received + self.repeats
        return self.repeats / deliveries if deliveries else None


@dataclass(frozen=True, slots=True)
class FeedbackHealth:
    """A project's feedback over the time looked back."""

    total: Intake
    by_sender: dict[str, Intake]
    delays: DelayQuantiles


def feedback_delays(
    *, project: Project | None = None, lane: Lane | None = None, back: timedelta = LOOK_BACK
) -> DelayQuantiles:
    """How long after its answer feedback arrives, in a project or on one lane, by the newest events."""
    owner = lane.project_id if lane is not None else project.pk if project is not None else None
    if owner is None:
        raise ValueError("name a project or a lane")
    values = {"project": owner, "lane": lane.pk if lane else None, "back": back, "newest": NEWEST}
    quantiles, n = _rows(_DELAYS, values)[0]
    p50, p95 = quantiles or (None, None)
    return DelayQuantiles(p50, p95, n)


def signals_matured(*, lane: Lane, since: datetime, horizon_s: float) -> int:
    """Events of the map that may be trained on and whose answer's horizon closed after `since`.

    Only answers of the promoted version count, with consent on both sides.
    """
    values = {
        "project": lane.project_id,
        "lane": lane.pk,
        "version": lane.promoted_version_id,
        "since": since,
        "horizon": timedelta(seconds=horizon_s),
        "joined": FeedbackState.JOINED.value,
        "train": Consent.TRAIN.value,
    }
    count: int = _rows(_MATURED, values)[0][0]
    return count


def feedback_health(project: Project, *, back: timedelta = LOOK_BACK) -> FeedbackHealth:
    """Everything about the feedback of a project that says whether the senders do well."""
    values = {"project": project.pk, "back": back, "from": _first_id(timezone.now() - back)}
    senders: dict[str, Intake] = {}
    for sender, received, repeats in _rows(_REPEATS, values):
        senders[sender] = Intake(received=received, repeats=int(repeats))
    for sender, state, count in _rows(_STATES, values):
        senders.setdefault(sender, Intake()).states[state] = count
    total = Intake()
    for intake in senders.values():
        total.received += intake.received
        total.repeats += intake.repeats
        for state, count in intake.states.items():
            total.states[state] = total.states.get(state, 0) + count
    return FeedbackHealth(total, dict(sorted(senders.items())), feedback_delays(project=project, back=back))


def _first_id(at: datetime) -> UUID:
    """The least id that a row made at that time can have: ids begin with the time, and are indexed."""
    return UUID(int=int(at.timestamp() * 1000) << 80)


def _rows(sql: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
