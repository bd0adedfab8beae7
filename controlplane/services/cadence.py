"""A lane's cadence as people steer it: set, paused, resumed; a slot run now, or skipped.

What the conductor makes of it is in `slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid, StaleRevision
from controlplane.models import CadenceSlot, Lane
from controlplane.selectors.feedback_health import feedback_delays
from controlplane.services.clock import database_now
from controlplane.services.events import Actor, conductor_nudge, require_reason
from controlplane.services.lanes import lane_locked, lane_record
from rl_core.errors import SpecError
from rl_core.shipping.freezes import frozen_at, interval_effective_s, thaws_at
from rl_core.shipping.specs import CadenceSpec, cadence_parse, cadence_resolve


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often slots can come: what was asked for, what feedback allows, and what holds them up."""

    interval_s: float
    interval_effective_s: float
    delay_p50_s: float | None
    delay_p95_s: float | None
    delays: int
    frozen_until: datetime | None

    @property
    def stretched(self) -> bool:
        """Whether feedback comes too late for the interval that was asked for."""
        return self.interval_effective_s > self.interval_s > 0


def cadence_of(lane: Lane) -> CadenceSpec | None:
    """The lane's cadence; None when it has none, and releases are made by hand alone."""
    return cadence_parse(lane.cadence) if lane.cadence else None


def rhythm_of(lane: Lane, spec: CadenceSpec, *, now: datetime | None = None) -> Rhythm:
    """The interval stretched to the time within which 95 % of the lane's feedback arrives."""
    delays = feedback_delays(lane=lane)
    moment = now or database_now()
    frozen = spec.freezes and frozen_at(spec, moment) is not None
    return Rhythm(
        interval_s=spec.interval_s,
        interval_effective_s=interval_effective_s(spec, delays.p95),
        delay_p50_s=delays.p50,
        delay_p95_s=delays.p95,
        delays=delays.n,
        frozen_until=thaws_at(spec, moment) if frozen else None,
    )


@transaction.atomic
def cadence_update(
    *, lane: Lane, cadence: dict[str, Any], actor: Actor, reason: str, expected_revision: int | None = None
) -> Lane:
    """Set the cadence; an empty one turns it off. A slot or release under way goes by the one that it began with.

    Raises: Invalid, naming the key; StaleRevision.
    """
    require_reason(reason, "say why the cadence changes")
    locked = _lane(lane, expected_revision)
    try:
        resolved = cadence_resolve(cadence_parse(cadence)) if cadence else {}
    except SpecError as error:
        raise Invalid(str(error), field="cadence") from error
    return _change(locked, actor=actor, reason=reason, change="cadence set", cadence=resolved, next_slot_at=None)


@transaction.atomic
def cadence_pause(*, lane: Lane, actor: Actor, reason: str, expected_revision: int | None = None) -> Lane:
    """Open no slot until it is resumed; a slot that trains or releases goes on. Raises: Conflict when it is paused."""
    require_reason(reason, "say why the cadence stands still")
    locked = _lane(lane, expected_revision)
    if locked.paused_at is not None:
        raise Conflict("the cadence is paused already")
    return _change(locked, actor=actor, reason=reason, change="cadence paused", paused_at=Now(), next_slot_at=None)


@transaction.atomic
def cadence_resume(*, lane: Lane, actor: Actor, reason: str, expected_revision: int | None = None) -> Lane:
    """Open slots again, the next one an interval from now. Raises: Conflict when it is not paused."""
    require_reason(reason, "say why the cadence goes on")
    locked = _lane(lane, expected_revision)
    if locked.paused_at is None:
        raise Conflict("the cadence is not paused")
    return _change(locked, actor=actor, reason=reason, change="cadence resumed", paused_at=None, next_slot_at=None)


def next_due(spec: CadenceSpec, *, after: datetime, interval_s: float, now: datetime) -> datetime | None:
    """When the slot after one that was due at `after` is due: on the beat, in the future, and never a burst of missed.

    None for a cadence that opens slots by hand alone.
    """
    if interval_s <= 0:
        return None
    missed = max(0, int((now - after).total_seconds() // interval_s))
    return after + timedelta(seconds=interval_s * (missed + 1))


def slot_begin(*, lane: Lane, spec: CadenceSpec, due_at: datetime, now: datetime) -> CadenceSlot:
    """The next slot's row, of a locked lane that has none open."""
    last = lane.cadence_slots.order_by("-number").first()
    deadline = now + timedelta(seconds=spec.deadline_s)
    return CadenceSlot.objects.create(
        lane=lane, number=last.number + 1 if last else 1, due_at=due_at, deadline_at=deadline
    )


def _lane(lane: Lane, expected_revision: int | None) -> Lane:
    locked = lane_locked(lane.pk)
    if expected_revision is not None and locked.revision != expected_revision:
        raise StaleRevision(f"the lane is at revision {locked.revision}, not {expected_revision}; read it again")
    return locked


def _change(lane: Lane, *, actor: Actor, reason: str, change: str, **values: Any) -> Lane:
    Lane.objects.filter(pk=lane.pk).update(revision=F("revision") + 1, **values)
    lane_record(lane, actor=actor, reason=reason, change=change)
    conductor_nudge()
    lane.refresh_from_db()
    return lane
