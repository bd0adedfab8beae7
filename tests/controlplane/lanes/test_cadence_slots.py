"""Slots of a cadence: opened on the beat by the database's clock, trained when data is there, released, or skipped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.errors import Conflict
from controlplane.models import (
    Alert,
    CadenceSlot,
    Event,
    Feedback,
    Generation,
    Lane,
    Release,
    Run,
    ServedVersion,
    SignalDefinition,
)
from controlplane.services.cadence import cadence_of, next_due, rhythm_of
from controlplane.services.clock import database_now
from controlplane.services.promotions import lane_rollback
from controlplane.services.slots import slot_run_now, slot_skip, slots_advance
from controlplane.states import EventType, ReleaseState, RunState, SlotState
from rl_core.shipping.specs import CadenceSpec
from tests.lane_rows import ACTOR, candidate_version
from tests.shipping_rig import (
    Users,
    assert_sound,
    finish_run,
    lane_of,
    make_due,
    propose,
    put_in,
    shipping_world,
    slot_of,
    to_canary,
)

pytestmark = pytest.mark.django_db

PAST = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_first_slot_is_due_one_interval_after_the_cadence_was_set():
    world = shipping_world(interval_s=3600.0)
    before = database_now()
    assert slots_advance(lane=world.lane) is None
    due = lane_of(world).next_slot_at
    assert timedelta(0) <= due - before - timedelta(seconds=3600) < timedelta(seconds=30)
    assert slots_advance(lane=world.lane) is None
    assert not CadenceSlot.objects.exists()


def test_a_slot_goes_from_open_to_done():
    world = shipping_world(interval_s=3600.0)
    slots_advance(lane=world.lane)
    make_due(world)
    slot = slots_advance(lane=world.lane)
    assert (slot.state, slot.number) == (SlotState.OPEN, 1)
    assert slot_of(world).deadline_at - slot_of(world).created_at >= timedelta(seconds=4 * 3600 - 30)
    assert slots_advance(lane=world.lane).state == SlotState.TRAINING
    run = slot_of(world).run
    assert run.spec["stages"][0]["lane"] == world.lane.slug
    assert run.lineage.parent == world.lane.promoted_version
    assert slots_advance(lane=world.lane).reason == "the run is pending"
    version = finish_run(run)
    assert slots_advance(lane=world.lane).state == SlotState.RELEASING
    release = slot_of(world).release
    assert (release.version, release.run, release.proposer, release.spec) == (
        version, run, None, lane_of(world).cadence,
    )  # fmt: skip
    put_in(release, ReleaseState.PROMOTED)
    slots_advance(lane=world.lane)
    done = slot_of(world)
    assert (done.state, done.reason) == (SlotState.DONE, "its release is promoted: it did")
    assert done.finished_at is not None
    changes = Event.objects.filter(type=EventType.SLOT_CHANGED).order_by("id").values_list("data__state", flat=True)
    assert list(changes) == ["open", "training", "releasing", "done"]


def test_overrides_of_the_stage_reach_the_run():
    world = shipping_world(stage={"optimizer_steps": 5})
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    assert slot_of(world).run.spec["stages"][0]["optimizer_steps"] == 5


def test_a_stage_that_does_not_validate_skips_the_slot_and_calls_a_person():
    world = shipping_world(stage={"optimizer_steps": 0})
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slot = slots_advance(lane=world.lane)
    assert slot.state == SlotState.SKIPPED
    assert "optimizer_steps" in slot.reason
    assert Alert.objects.get(lane=world.lane).kind == "slot_skipped"
    assert not Run.objects.filter(project=world.project).exists()


def give_signals(world, count: int, *, seconds_ago: float) -> None:
    users = Users(world)
    signal = SignalDefinition.objects.get(project=world.project, slug="thumbs")
    for number in range(count):
        generation = users.ask(f"u{number}", consent="train")
        backdate(generation, seconds_ago)
        Feedback.objects.create(
            project=world.project,
            sender="k",
            signal=signal,
            state="joined",
            target_kind="generation",
            target_id=str(generation.id),
            generation_id=generation.id,
            value=True,
            occurred_at=timezone.now(),
            consent="train",
        )


def backdate(generation: Generation, seconds: float) -> None:
    Generation.objects.filter(id=generation.id).update(created_at=database_now() - timedelta(seconds=seconds))


def test_a_slot_waits_for_signals_whose_horizon_has_closed():
    world = shipping_world(minimum_signals=3, horizon_s=600.0)
    ServedVersion.objects.filter(lane=world.lane).update(created_at=database_now() - timedelta(hours=1))
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    give_signals(world, 3, seconds_ago=0)
    slot = slots_advance(lane=world.lane)
    assert (slot.state, slot.reason) == (SlotState.OPEN, "waits for signals: 0 of 3 have matured")
    revision_events = Event.objects.count()
    slots_advance(lane=world.lane)
    assert Event.objects.count() == revision_events  # waiting writes nothing
    Generation.objects.filter(lane=world.lane).update(created_at=database_now() - timedelta(seconds=601))
    assert slots_advance(lane=world.lane).state == SlotState.TRAINING


def test_signals_that_matured_while_a_slot_was_open_do_not_count_for_the_next():
    world = shipping_world(minimum_signals=3, horizon_s=1.0)
    an_hour, a_minute = (database_now() - timedelta(seconds=seconds) for seconds in (3600, 60))
    ServedVersion.objects.filter(lane=world.lane).update(created_at=an_hour)
    slot = slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    CadenceSlot.objects.filter(pk=slot.pk).update(created_at=a_minute)
    give_signals(world, 3, seconds_ago=5)
    assert slots_advance(lane=world.lane).state == SlotState.TRAINING
    slot_skip(lane=world.lane, actor=ACTOR, reason="spoilt")
    slot_run_now(lane=world.lane, actor=ACTOR, reason="again")
    assert slots_advance(lane=world.lane).reason == "waits for signals: 0 of 3 have matured"


def test_the_interval_is_no_shorter_than_feedback_needs():
    world = shipping_world(interval_s=60.0)
    spec = cadence_of(lane_of(world))
    assert rhythm_of(world.lane, spec).interval_effective_s == 60.0
    give_signals(world, 4, seconds_ago=900)
    rhythm = rhythm_of(world.lane, spec)
    assert rhythm.stretched
    assert rhythm.interval_effective_s == pytest.approx(900, abs=30)
    assert rhythm.delays == 4
    slots_advance(lane=world.lane)
    assert lane_of(world).next_slot_at - database_now() > timedelta(seconds=850)


def test_missed_slots_are_not_made_up_and_the_beat_is_kept():
    spec = CadenceSpec(interval_s=60.0)
    now = PAST + timedelta(seconds=605)
    assert next_due(spec, after=PAST, interval_s=60.0, now=now) == PAST + timedelta(seconds=660)
    assert next_due(spec, after=PAST, interval_s=60.0, now=PAST - timedelta(days=1)) == PAST + timedelta(seconds=60)
    assert next_due(spec, after=PAST, interval_s=0.0, now=now) is None


def test_after_a_long_silence_of_the_conductor_one_slot_opens():
    world = shipping_world(interval_s=60.0)
    Lane.objects.filter(pk=world.lane.pk).update(next_slot_at=PAST)
    slots_advance(lane=world.lane)
    assert CadenceSlot.objects.get().due_at == PAST
    lane = lane_of(world)
    assert timedelta(0) < lane.next_slot_at - database_now() <= timedelta(seconds=60)
    assert (lane.next_slot_at - PAST).total_seconds() % 60 == 0


ALWAYS = [{"kind": "once", "start": "2000-01-01T00:00:00Z", "end": "2100-01-01T00:00:00Z"}]


def test_a_slot_that_is_due_in_a_freeze_is_skipped_and_the_next_comes_with_the_thaw():
    world = shipping_world(interval_s=60.0, freezes=ALWAYS)
    make_due(world)
    slots_advance(lane=world.lane)
    slot = slot_of(world)
    assert (slot.state, slot.reason) == (SlotState.SKIPPED, "frozen until 2100-01-01T00:00:00+00:00")
    assert lane_of(world).next_slot_at == datetime(2100, 1, 1, tzinfo=UTC)
    assert not Alert.objects.filter(lane=world.lane).exists()
    with pytest.raises(Conflict, match="frozen until"):
        slot_run_now(lane=world.lane, actor=ACTOR, reason="now")


def test_undecided_at_its_deadline_whatever_it_was_at():
    world = shipping_world()
    for reach in ("open", "training", "releasing"):
        slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
        if reach != "open":
            slots_advance(lane=world.lane)
        if reach == "releasing":
            finish_run(slot_of(world).run)
            slots_advance(lane=world.lane)
            to_canary(world, slot_of(world).release)
        assert slot_of(world).state == reach
        CadenceSlot.objects.filter(pk=slot_of(world).pk).update(deadline_at=database_now() - timedelta(seconds=1))
        slots_advance(lane=world.lane)
        slot = slot_of(world)
        assert slot.state == SlotState.SKIPPED
        assert slot.reason.startswith("undecided at its deadline")
        if slot.run and reach == "training":
            assert slot.run.state == RunState.STOPPED
        if slot.release:
            assert (slot.release.state, slot.release.share) == (ReleaseState.SKIPPED, 0.0)
        assert_sound(world.lane)
    assert Alert.objects.filter(lane=world.lane, kind="slot_skipped").count() == 1  # one open alert, not one a slot


def test_a_run_that_fails_skips_its_slot():
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    Run.objects.filter(pk=slot_of(world).run_id).update(state=RunState.FAILED, state_reason="out of memory")
    slots_advance(lane=world.lane)
    assert slot_of(world).reason == "the run is failed: out of memory"


def test_a_candidate_of_an_older_incumbent_is_superseded():
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    finish_run(slot_of(world).run)
    Lane.objects.filter(pk=world.lane.pk).update(promoted_version=candidate_version(world))
    slots_advance(lane=world.lane)
    assert slot_of(world).state == SlotState.SKIPPED
    assert slot_of(world).reason.startswith("superseded")


def test_a_slot_waits_for_a_release_that_a_person_has_in_flight():
    world = shipping_world()
    other = propose(world)
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    finish_run(slot_of(world).run)
    slots_advance(lane=world.lane)
    assert (slot_of(world).state, slot_of(world).reason) == (
        SlotState.TRAINING, "waits for the release that is in flight",
    )  # fmt: skip
    Release.objects.filter(pk=other.pk).update(state="skipped")
    slots_advance(lane=world.lane)
    assert slot_of(world).state == SlotState.RELEASING


def test_what_trains_from_a_version_that_is_rolled_back_is_skipped():
    world = shipping_world()
    first = world.lane.promoted_version
    release = put_in(propose(world), ReleaseState.PROMOTED)
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    slots_advance(lane=world.lane)
    assert slot_of(world).run.lineage.parent == release.version
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    slots_advance(lane=world.lane)
    slot = slot_of(world)
    assert (slot.state, slot.run.state) == (SlotState.SKIPPED, RunState.STOPPED)
    assert "rolled back" in slot.reason
