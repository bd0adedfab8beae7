"""A cadence as people steer it: paused, resumed, held, run now, skipped; and whose clock it goes by."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import Conflict, Invalid, StaleRevision
from controlplane.models import CadenceSlot, Event, Lane
from controlplane.services.cadence import cadence_pause, cadence_resume, cadence_update
from controlplane.services.clock import database_now
from controlplane.services.slots import slot_run_now, slot_skip, slots_advance
from controlplane.states import EventType, RunState, SlotState
from tests.lane_rows import ACTOR
from tests.shipping_rig import finish_run, lane_of, make_due, shipping_world, slot_of, to_canary

pytestmark = pytest.mark.django_db

PAST = datetime(2026, 1, 1, tzinfo=UTC)


def test_paused_and_resumed():
    world = shipping_world(interval_s=60.0)
    make_due(world)
    lane = cadence_pause(lane=lane_of(world), actor=ACTOR, reason="holidays")
    assert (lane.next_slot_at, lane.paused_at is None) == (None, False)
    assert slots_advance(lane=world.lane) is None
    with pytest.raises(Conflict):
        cadence_pause(lane=lane, actor=ACTOR, reason="again")
    with pytest.raises(StaleRevision):
        cadence_resume(lane=lane, actor=ACTOR, reason="back", expected_revision=lane.revision - 1)
    lane = cadence_resume(lane=lane, actor=ACTOR, reason="back", expected_revision=lane.revision)
    slots_advance(lane=lane)
    assert lane_of(world).next_slot_at > database_now()
    with pytest.raises(Conflict):
        cadence_resume(lane=lane, actor=ACTOR, reason="back")
    last = Event.objects.filter(type=EventType.LANE_CHANGED).order_by("-id").first()
    assert (last.reason, last.data["change"]) == ("back", "cadence resumed")


def test_skipping_ends_what_is_under_way_or_gives_up_the_next_turn():
    world = shipping_world(interval_s=3600.0)
    with pytest.raises(Conflict):
        slot_skip(lane=world.lane, actor=ACTOR, reason="no")
    slots_advance(lane=world.lane)
    planned = lane_of(world).next_slot_at
    slot = slot_skip(lane=world.lane, actor=ACTOR, reason="not this one")
    assert (slot.state, slot.due_at, slot.reason) == (SlotState.SKIPPED, planned, "not this one")
    assert lane_of(world).next_slot_at == planned + timedelta(seconds=3600)
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    slot_skip(lane=world.lane, actor=ACTOR, reason="enough")
    assert slot_of(world).run.state == RunState.STOPPED
    with pytest.raises(Invalid):
        slot_skip(lane=world.lane, actor=ACTOR, reason=" ")


def test_a_second_slot_is_refused_while_one_is_under_way():
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    with pytest.raises(Conflict, match="slot 1 is open"):
        slot_run_now(lane=world.lane, actor=ACTOR, reason="now")


def test_a_cadence_that_does_not_validate_is_refused_with_its_key():
    world = shipping_world()
    before = lane_of(world)
    for cadence, word in (
        ({"interval": 3}, "interval"),
        ({"canary": {"steps": [0.5, 0.1]}}, "rise"),
        ({"timezone": "Mars/Olympus"}, "Mars"),
    ):
        with pytest.raises(Invalid, match=word):
            cadence_update(lane=before, cadence=cadence, actor=ACTOR, reason="x")
    assert lane_of(world).revision == before.revision


def test_no_cadence_no_slots():
    world = shipping_world(interval_s=60.0)
    slots_advance(lane=world.lane)
    cadence_update(lane=lane_of(world), cadence={}, actor=ACTOR, reason="by hand from now on")
    advance_lanes()
    assert (lane_of(world).next_slot_at, CadenceSlot.objects.count()) == (None, 0)
    with pytest.raises(Conflict, match="no cadence"):
        slot_run_now(lane=world.lane, actor=ACTOR, reason="now")


@pytest.mark.parametrize("wrong", [PAST, datetime(2099, 1, 1, tzinfo=UTC)])
def test_the_clocks_of_the_processes_do_not_matter(monkeypatch, wrong):
    """Slots, holds and deadlines go by the database's clock alone, so that a machine with a wrong one does no harm."""

    class Wrong(datetime):
        @classmethod
        def now(cls, tz=None):
            return wrong.astimezone(tz) if tz else wrong.replace(tzinfo=None)

    world = shipping_world(interval_s=3600.0)
    monkeypatch.setattr(time, "time", wrong.timestamp)
    monkeypatch.setattr(timezone, "now", lambda: wrong)
    for module in ("cadence", "slots", "canaries", "promotions"):
        monkeypatch.setattr(f"controlplane.services.{module}.datetime", Wrong, raising=False)
    slots_advance(lane=world.lane)
    assert abs(lane_of(world).next_slot_at - database_now() - timedelta(seconds=3600)) < timedelta(seconds=60)
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    assert slots_advance(lane=world.lane).state == SlotState.TRAINING
    slot = slot_of(world)
    assert abs(slot.due_at - database_now()) < timedelta(seconds=60)
    assert slot.deadline_at - slot.due_at == timedelta(seconds=4 * 3600)
    finish_run(slot.run)
    slots_advance(lane=world.lane)
    release = to_canary(world, slot_of(world).release)
    assert abs(release.steps.get().created_at - database_now()) < timedelta(seconds=60)


def test_a_held_lane_opens_no_slot_and_one_that_is_open_waits():
    world = shipping_world(interval_s=60.0)
    make_due(world)
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="refusals rise")
    assert slots_advance(lane=world.lane) is None
    assert lane_of(world).next_slot_at is None
    with pytest.raises(Conflict, match="held"):
        slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="")
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="refusals rise")
    slot = slots_advance(lane=world.lane)
    assert (slot.state, slot.reason.split(":")[0]) == (SlotState.OPEN, "waits")
