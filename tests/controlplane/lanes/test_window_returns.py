"""A candidate without a verdict gives its window back to the next one; what others learned from stays spent."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction

from controlplane.conductor.shipping import advance_lanes
from controlplane.models import BatchItem, CadenceSlot, Release, Run, Step
from controlplane.services.clock import database_now
from controlplane.services.promotions import release_rollback
from controlplane.services.releases import release_end
from controlplane.services.retractions import versions_trained_on
from controlplane.services.runs import run_stop
from controlplane.services.slots import slot_run_now
from controlplane.services.steps import BatchEntry, step_create
from controlplane.services.windows import window_collect
from controlplane.states import Consent, ReleaseState, RunState, SlotState, StepState
from rl_core.store import open_store
from tests.lane_rows import ACTOR
from tests.shipping_rig import (
    assert_sound,
    evaluate,
    finish_run,
    make_run,
    propose,
    shipping_world,
    slot_of,
    to_canary,
)

pytestmark = pytest.mark.django_db


def answers(world, count: int = 3) -> list:
    """The ids of so many recorded answers of the promoted version."""
    store = open_store("memory:///")
    rows = [world.generate(store, user_key=f"u{number}", consent=Consent.TRAIN) for number in range(count)]
    return [row.id for row in rows]


def batch(run: Run, generations: list) -> Step:
    """The run trains on them, and its version is published."""
    entries = [BatchEntry(group_key="window", reward=1.0, trajectory_key="t", generation_id=key) for key in generations]
    step = step_create(run=run, stage=run.stages.first(), entries=entries)
    Step.objects.filter(pk=step.pk).update(state=StepState.PUBLISHED, version=run.lineage.head)
    return step


def free(world) -> int:
    """How many answers a window could choose from now."""
    return window_collect(lane=world.lane).generations


def trained(world) -> tuple[Run, list]:
    """A finished run with a window of three answers."""
    run, generations = make_run(world), answers(world)
    batch(run, generations)
    assert free(world) == 0
    return run, generations


def proposed(world, run: Run, **changes) -> Release:
    return propose(world, version=run.lineage.head, run=run, **changes)


def test_an_answer_is_in_one_batch_at_a_time():
    world = shipping_world()
    _, generations = trained(world)
    with pytest.raises(IntegrityError), transaction.atomic():
        batch(make_run(world), generations[:1])


def test_a_superseded_candidate_gives_its_window_back():
    world = shipping_world()
    first, generations = trained(world)
    second = make_run(world)
    release = proposed(world, first)
    proposed(world, second, supersede=True)
    release.refresh_from_db()
    assert release.state == ReleaseState.SKIPPED
    assert release.outcome.endswith("(3 answers go back to the next window)")
    assert free(world) == 3
    third = make_run(world)
    batch(third, generations)
    assert free(world) == 0
    trained_on = [str(run.lineage.head) for run in (first, third)]
    assert sorted(versions_trained_on(generations[:1])) == sorted(trained_on)  # both are told where consent ends


def test_a_candidate_that_failed_its_gate_keeps_what_it_learned_from():
    world = shipping_world()
    run, _ = trained(world)
    release = proposed(world, run)
    advance_lanes()
    evaluate(release, candidate=0.1, incumbent=0.9)
    advance_lanes()
    release.refresh_from_db()
    assert (release.state, free(world)) == (ReleaseState.FAILED, 0)


def test_an_inconclusive_gate_gives_the_window_back():
    world = shipping_world()
    run, _ = trained(world)
    release = proposed(world, run)
    advance_lanes()
    evaluate(release, tasks=1)
    advance_lanes()
    release.refresh_from_db()
    assert (release.state, free(world)) == (ReleaseState.SKIPPED, 3)


def test_a_canary_that_is_rolled_back_keeps_it_and_one_that_is_aborted_does_not():
    for end, state, left in (
        (release_rollback, ReleaseState.ROLLED_BACK, 0),
        (release_end, ReleaseState.SKIPPED, 3),
    ):
        world = shipping_world()
        run, _ = trained(world)
        release = to_canary(world, proposed(world, run))
        end(release=release, actor=ACTOR, reason="enough")
        release.refresh_from_db()
        assert (release.state, free(world)) == (state, left)
        assert_sound(world.lane)


def test_a_run_that_is_stopped_gives_its_window_back_once():
    world = shipping_world()
    run, _ = trained(world)
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    stopped = run_stop(run=Run.objects.get(pk=run.pk), actor=ACTOR, reason="not this one")
    assert stopped.state_reason == "not this one (3 answers go back to the next window)"
    assert free(world) == 3
    at = set(BatchItem.objects.values_list("returned_at", flat=True))
    release = proposed(world, run)
    release_end(release=release, actor=ACTOR, reason="nor now")
    assert set(BatchItem.objects.values_list("returned_at", flat=True)) == at


@pytest.mark.parametrize("at_its_deadline", [False, True])
def test_a_slot_says_what_it_gives_back(at_its_deadline):
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    advance_lanes()
    run = slot_of(world).run
    finish_run(run, state=RunState.RUNNING if at_its_deadline else RunState.FAILED)
    batch(Run.objects.get(pk=run.pk), answers(world))
    if at_its_deadline:
        CadenceSlot.objects.update(deadline_at=database_now() - timedelta(seconds=1))
    advance_lanes()
    slot = slot_of(world)
    assert (slot.state, free(world)) == (SlotState.SKIPPED, 3)
    assert slot.reason.endswith("(3 answers go back to the next window)")


def test_a_slots_release_that_is_undecided_at_the_deadline_gives_back():
    world = shipping_world()
    slot_run_now(lane=world.lane, actor=ACTOR, reason="now")
    advance_lanes()
    run = slot_of(world).run
    finish_run(run)
    batch(Run.objects.get(pk=run.pk), answers(world))
    advance_lanes()
    release = to_canary(world, slot_of(world).release)
    CadenceSlot.objects.update(deadline_at=database_now() - timedelta(seconds=1))
    advance_lanes()
    release.refresh_from_db()
    assert (release.state, free(world)) == (ReleaseState.SKIPPED, 3)
    for said in (release.outcome, slot_of(world).reason):
        assert said.count("(3 answers go back to the next window)") == 1
