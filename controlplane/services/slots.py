"""Slots of a lane's cadence: opened when due, trained when their data is there, released, done or skipped.

`slots_advance` is called by the conductor again and again; it takes one step at a time and waits for nothing. What a
slot waits for stands in its `reason`. At its deadline a slot that is undecided is skipped, whatever it was at.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.errors import Conflict, ControlPlaneError, StaleRevision
from controlplane.models import CadenceSlot, Lane, Release, ServedVersion
from controlplane.selectors.feedback_health import signals_matured
from controlplane.services.alerts import alert_raise
from controlplane.services.cadence import cadence_of, next_due, rhythm_of, slot_begin
from controlplane.services.clock import database_now
from controlplane.services.events import CONDUCTOR, Actor, conductor_nudge, event_append, lane_topic, require_reason
from controlplane.services.lanes import lane_locked
from controlplane.services.promotions import closed_because
from controlplane.services.quarantine import quarantined_in_line
from controlplane.services.releases import ENDED, IN_FLIGHT, release_close, release_locked, release_propose
from controlplane.services.runs import run_stop
from controlplane.services.transitions import sources_of, transition
from controlplane.services.window_returns import returned_note, window_return
from controlplane.services.windows import lane_train
from controlplane.states import AlertKind, Arm, EventType, ReleaseState, RunState, SlotState
from rl_core.errors import RlCoreError
from rl_core.shipping.freezes import frozen_at, thaws_at
from rl_core.shipping.specs import CadenceSpec

OPEN = (SlotState.OPEN, SlotState.TRAINING, SlotState.RELEASING)


def lanes_with_slots() -> list[Lane]:
    """Lanes that the conductor has to look at: those with a cadence, or with a slot under way."""
    busy = CadenceSlot.objects.filter(state__in=OPEN).values("lane")
    return list(Lane.objects.filter(~Q(cadence={}) | Q(pk__in=busy)).order_by("pk"))


def slot_open(lane: Lane) -> CadenceSlot | None:
    """The lane's slot that has not ended."""
    return lane.cadence_slots.filter(state__in=OPEN).select_related("run__lineage__head", "release").first()


@transaction.atomic
def slots_advance(*, lane: Lane) -> CadenceSlot | None:
    """Take the lane's cadence one step on; the slot under way, or None."""
    locked = lane_locked(lane.pk)
    spec, slot = cadence_of(locked), slot_open(locked)
    if slot is None:
        return _open_when_due(locked, spec) if spec else None
    if slot.deadline_at <= database_now():
        return _skip(locked, slot, actor=CONDUCTOR, reason=_undecided(slot), alarm=True)
    if slot.state == SlotState.OPEN:
        return _train_when_ready(locked, slot, spec)
    if slot.state == SlotState.TRAINING:
        return _release_when_trained(locked, slot)
    return _finish_when_released(locked, slot)


def _open_when_due(lane: Lane, spec: CadenceSpec) -> CadenceSlot | None:
    now = database_now()
    if lane.paused_at is not None or lane.hold_reason or spec.interval_s <= 0:
        if lane.next_slot_at is not None:
            Lane.objects.filter(pk=lane.pk).update(next_slot_at=None)
        return None
    if lane.next_slot_at is not None and lane.next_slot_at > now:
        return None
    interval_s = rhythm_of(lane, spec, now=now).interval_effective_s
    if lane.next_slot_at is None:
        last = lane.cadence_slots.order_by("-number").first()
        after = max(last.due_at, last.finished_at or last.due_at) if last else now
        _due(lane, next_due(spec, after=after, interval_s=interval_s, now=now))
        return None
    slot = slot_begin(lane=lane, spec=spec, due_at=lane.next_slot_at, now=now)
    if frozen_at(spec, now) is not None:
        thaw = thaws_at(spec, now)
        _due(lane, thaw)
        return _skip(lane, slot, actor=CONDUCTOR, reason=f"frozen until {thaw.isoformat()}")
    _due(lane, next_due(spec, after=lane.next_slot_at, interval_s=interval_s, now=now))
    _record(slot, actor=CONDUCTOR, reason="")
    conductor_nudge()
    return slot


def _due(lane: Lane, at: Any) -> None:
    Lane.objects.filter(pk=lane.pk).update(next_slot_at=at)
    lane.next_slot_at = at


def _train_when_ready(lane: Lane, slot: CadenceSlot, spec: CadenceSpec | None) -> CadenceSlot:
    """Train once enough feedback has matured since the version that answers began to, or since the last window."""
    if spec is None:
        return _skip(lane, slot, actor=CONDUCTOR, reason="the lane has no cadence any more")
    waits = "the cadence is paused" if lane.paused_at is not None else closed_because(lane, spec)
    if waits:
        return _note(slot, f"waits: {waits}")
    matured = signals_matured(lane=lane, since=window_began(lane, slot), horizon_s=spec.horizon_s)
    if matured < spec.minimum_signals:
        return _note(slot, f"waits for signals: {matured} of {spec.minimum_signals} have matured")
    try:
        with transaction.atomic():
            run = lane_train(
                lane=lane,
                name=f"{lane.slug} slot {slot.number}",
                actor=CONDUCTOR,
                user=None,
                overrides=spec.stage,
            )
    except (ControlPlaneError, RlCoreError) as error:
        return _skip(lane, slot, actor=CONDUCTOR, reason=f"no run: {error}", alarm=True)
    return _move(slot, to=SlotState.TRAINING, reason=f"{matured} signals have matured", run=run)


def window_began(lane: Lane, slot: CadenceSlot | None) -> datetime:
    """Since when signals count for the slot, or for the next: its version began to answer, or the last slot trained."""
    served = ServedVersion.objects.filter(lane=lane, arm=Arm.PROMOTED, until__isnull=True).first()
    earlier = lane.cadence_slots.filter(run__isnull=False)
    trained = (earlier.exclude(pk=slot.pk) if slot else earlier).order_by("-number").first()
    run = trained.run if trained else None  # not the slot: what matured while it was open is what it trained on
    return max([row.created_at for row in (served, run) if row is not None], default=lane.created_at)


def _release_when_trained(lane: Lane, slot: CadenceSlot) -> CadenceSlot:
    run = slot.run
    if run is None or run.state in (RunState.FAILED, RunState.STOPPED):
        why = f"the run is {run.state}: {run.state_reason}" if run else "the run is gone"
        return _skip(lane, slot, actor=CONDUCTOR, reason=why, alarm=True)
    parent = run.lineage.parent
    if parent is not None and quarantined_in_line(parent) is not None:
        return _skip(lane, slot, actor=CONDUCTOR, reason=f"it trains from {parent}, which was rolled back")
    if run.state != RunState.COMPLETED:
        return _note(slot, f"the run is {run.state}" + (f": {run.state_reason}" if run.state_reason else ""))
    if parent is None or parent.pk != lane.promoted_version_id:
        why = f"superseded: it was trained from {parent}, and the lane serves {lane.promoted_version}"
        return _skip(lane, slot, actor=CONDUCTOR, reason=why)
    if lane.releases.filter(state__in=IN_FLIGHT).exists():
        return _note(slot, "waits for the release that is in flight")
    head = run.lineage.head
    if head is None or head.number == 0:
        return _skip(lane, slot, actor=CONDUCTOR, reason="the run made no version", alarm=True)
    try:
        with transaction.atomic():
            release = release_propose(
                lane=lane,
                version=head,
                run=run,
                proposer=None,
                actor=CONDUCTOR,
                reason=f"slot {slot.number}",
            )
    except ControlPlaneError as error:
        return _skip(lane, slot, actor=CONDUCTOR, reason=f"no release: {error}", alarm=True)
    return _move(slot, to=SlotState.RELEASING, reason=f"version {head} is proposed", release=release)


def _finish_when_released(lane: Lane, slot: CadenceSlot) -> CadenceSlot:
    release = slot.release
    if release is None:
        return _skip(lane, slot, actor=CONDUCTOR, reason="its release is gone", alarm=True)
    if release.state not in ENDED:
        return _note(slot, f"the release is {release.state}")
    if release.state == ReleaseState.SKIPPED:
        return _skip(lane, slot, actor=CONDUCTOR, reason=_ended(release), alarm=True)
    return _move(slot, to=SlotState.DONE, reason=_ended(release), finished_at=Now())


def _ended(release: Release) -> str:
    """How the slot's release ended, and why."""
    return f"its release is {release.state}" + (f": {release.outcome}" if release.outcome else "")


@transaction.atomic
def slot_run_now(*, lane: Lane, actor: Actor, reason: str, expected_revision: int | None = None) -> CadenceSlot:
    """Open a slot at once, also of a cadence that is paused or runs by hand alone. The beat of the others is kept.

    Raises: Conflict without a cadence, while a slot is under way, in a hold or a freeze; StaleRevision.
    """
    require_reason(reason, "say why a slot opens now")
    locked = _checked(lane, expected_revision)
    spec = cadence_of(locked)
    if spec is None:
        raise Conflict("the lane has no cadence; set one first")
    present = slot_open(locked)
    if present is not None:
        raise Conflict(f"slot {present.number} is {present.state}; skip it first")
    closed = closed_because(locked, spec)
    if closed:
        raise Conflict(closed)
    now = database_now()
    slot = slot_begin(lane=locked, spec=spec, due_at=now, now=now)
    _record(slot, actor=actor, reason=reason)
    conductor_nudge()
    slot.refresh_from_db()
    return slot


@transaction.atomic
def slot_skip(*, lane: Lane, actor: Actor, reason: str, expected_revision: int | None = None) -> CadenceSlot:
    """End the slot under way, its run or its release with it; or, when there is none, give up the next one's turn.

    Raises: Conflict when no slot is under way and none is planned; StaleRevision.
    """
    require_reason(reason, "say why the slot is skipped")
    locked = _checked(lane, expected_revision)
    spec, slot = cadence_of(locked), slot_open(locked)
    if slot is not None:
        return _skip(locked, slot, actor=actor, reason=reason)
    if spec is None or locked.next_slot_at is None:
        raise Conflict("no slot is under way, and none is planned")
    now = database_now()
    slot = slot_begin(lane=locked, spec=spec, due_at=locked.next_slot_at, now=now)
    interval_s = rhythm_of(locked, spec, now=now).interval_effective_s
    _due(locked, next_due(spec, after=locked.next_slot_at, interval_s=interval_s, now=now))
    return _skip(locked, slot, actor=actor, reason=reason)


def _checked(lane: Lane, expected_revision: int | None) -> Lane:
    locked = lane_locked(lane.pk)
    if expected_revision is not None and locked.revision != expected_revision:
        raise StaleRevision(f"the lane is at revision {locked.revision}, not {expected_revision}; read it again")
    return locked


def _undecided(slot: CadenceSlot) -> str:
    return f"undecided at its deadline: {slot.reason or slot.state}"


def _skip(lane: Lane, slot: CadenceSlot, *, actor: Actor, reason: str, alarm: bool = False) -> CadenceSlot:
    """End the slot without a decision, and withdraw what it had under way. Its window goes back."""
    run, release = slot.run, slot.release
    if run is not None and (release is None or release.state in IN_FLIGHT):
        reason += returned_note(window_return(run=run))
    if run is not None and run.state in sources_of(RunState.STOPPED):
        run_stop(run=run, actor=actor, reason=reason)
    if release is not None and release.state in IN_FLIGHT:
        release_close(release_locked(release), to=ReleaseState.SKIPPED, actor=actor, reason=reason)
    _move(slot, to=SlotState.SKIPPED, reason=reason, actor=actor, finished_at=Now())
    if alarm:
        detail = {"about": f"slot {slot.number}", "reason": reason, "number": slot.number}
        alert_raise(lane=lane, kind=AlertKind.SLOT_SKIPPED, subject="slots", detail=detail)
    return slot


def _move(slot: CadenceSlot, *, to: SlotState, reason: str, actor: Actor = CONDUCTOR, **changes: Any) -> CadenceSlot:
    transition(slot, to=to, reason=reason[:500], **changes)
    _record(slot, actor=actor, reason=reason)
    conductor_nudge()
    return slot


def _note(slot: CadenceSlot, reason: str) -> CadenceSlot:
    """Say what the slot waits for; nothing is written while it says so already."""
    if slot.reason != reason[:500]:
        CadenceSlot.objects.filter(pk=slot.pk).update(reason=reason[:500])
        slot.reason = reason[:500]
    return slot


def _record(slot: CadenceSlot, *, actor: Actor, reason: str) -> None:
    event_append(
        project_id=slot.lane.project_id,
        topic=lane_topic(slot.lane_id),
        event_type=EventType.SLOT_CHANGED,
        actor=actor,
        reason=reason,
        data={"slot": str(slot.pk), "number": slot.number, "state": slot.state, "detail": reason},
    )
