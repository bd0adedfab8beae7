"""A window with a replay share: simulated tasks are rolled out by its version and mixed into its batch."""

from __future__ import annotations

import random

import pytest

from controlplane.conductor import run_advance
from controlplane.errors import Invalid
from controlplane.models import ReplicaSlot, RolloutGroup, Stage
from controlplane.selectors.rollout_plans import rollout_plan
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.feedback import feedback_receive
from controlplane.services.groups import groups_discard
from controlplane.services.windows import lane_train
from controlplane.states import GroupPurpose, GroupState, RunState, StageState
from rl_core.session_specs import CompactionKind, CompactionSpec, Limits
from rl_core.specs import ReplaySpec
from rl_core.store import open_store
from rl_core.types import Objective
from tests.domain_factories import CRITERIA, make_cluster, make_tasks
from tests.lane_rows import ACTOR, lane_world, thumbs
from tests.simulated_workers import Simulation

pytestmark = pytest.mark.django_db

REPLAY = {
    "share": 0.5,
    "group_size": 2,
    "sampling": {"max_tokens": 12},
    "max_turns": 3,
    "max_context_tokens": 256,
    "max_sampled_tokens": 99,
    "max_wall_s": 60.0,
    "max_parallel_calls": 2,
    "compaction": {"kind": "drop_tool_results"},
}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def catalogued():
    """A lane in a project with simulated tasks and a rollout cluster to roll them out on."""
    world = lane_world()
    task_set_create(
        project=world.project, slug="word-problems", environment="word-problems", tasks=make_tasks(), actor=ACTOR
    )
    rubric_publish(project=world.project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=ACTOR)
    make_cluster(world.project)
    return world


def answered(world, store, count, *, first=0):
    for number in range(first, first + count):
        generation = world.generate(store, user_key=f"user-{number}")
        body = thumbs(generation.id, value=number % 2 == 0)
        feedback_receive(project=world.project, sender="k", source=None, data=body, actor=ACTOR)


def start(world, **replay):
    overrides = {"minimum_answers": 4, "replay": {**REPLAY, **replay}}
    return lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides=overrides)


def test_the_share_decides_how_many_groups():
    assert ReplaySpec(share=0.0).groups(100) == 0
    assert ReplaySpec(share=0.5, group_size=8).groups(32) == 4
    assert ReplaySpec(share=0.25, group_size=8).groups(90) == 4  # 30 attempts, in whole groups
    assert ReplaySpec(share=0.2, group_size=4).groups(0) == 0


def test_replayed_groups_are_mixed_into_the_batch(store):
    world = catalogued()
    answered(world, store, 5)
    run = start(world)
    Simulation(run, random.Random(1), misbehaviour=0.0).go(rounds=400)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED, run.state_reason
    step = run.steps.get()
    items = list(step.batch.order_by("position"))
    assert [item.generation_id is not None for item in items] == [True] * 5 + [False] * 6
    assert (step.window["items"], step.window["replayed"]) == (5, 6)
    groups = RolloutGroup.objects.filter(run=run)
    assert {(group.purpose, group.state, group.step_id) for group in groups} == {
        (GroupPurpose.TRAIN, GroupState.CONSUMED, step.pk)
    }
    assert {group.admitted_version.root for group in groups} == {world.lane.promoted_version.root}
    for group in groups:
        own = [item for item in items if item.group_key == str(group.pk)]
        mean = sum(item.reward for item in own) / 2
        assert [item.advantage for item in own] == pytest.approx([item.reward - mean for item in own])
        assert {(item.weight, item.objective) for item in own} == {(1.0, Objective.POLICY_GRADIENT)}
    slots = ReplicaSlot.objects.filter(replica__cluster__slug="east", slot="default")
    assert {slot.current_version.lineage_id for slot in slots} == {run.lineage_id}


def test_workers_that_misbehave_do_not_change_what_is_trained(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    simulation = Simulation(run, random.Random(3), misbehaviour=0.3)
    simulation.go(rounds=2000)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED, run.state_reason
    assert run.steps.get().batch.count() == 4 + 4
    assert simulation.crashed + simulation.refused > 0


def test_groups_follow_the_replays_settings(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    for _ in range(2):
        run_advance(run.pk)
    group = RolloutGroup.objects.filter(run=run).first()
    plan = rollout_plan(group)
    assert plan.sampling.max_tokens == 12
    assert plan.limits == Limits(
        max_turns=3,
        max_context_tokens=256,
        max_sampled_tokens=99,
        max_wall_s=60.0,
        max_parallel_calls=2,
        compaction=CompactionSpec(kind=CompactionKind.DROP_TOOL_RESULTS),
    )
    assert (plan.max_staleness, plan.exact_version) == (0, None)
    assert plan.lineage_id == run.lineage_id


def test_the_window_closes_when_the_replay_is_asked_for(store):
    """Else a busy lane's batch would run after its own share for ever."""
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    for _ in range(2):
        run_advance(run.pk)
    run.refresh_from_db()
    assert run.state_reason == "waits for replay: 0 of 2 groups"
    answered(world, store, 6, first=10)
    run_advance(run.pk)
    assert RolloutGroup.objects.filter(run=run).count() == 2
    Simulation(run, random.Random(1), misbehaviour=0.0).go(rounds=400)
    step = run.steps.get()
    assert (step.window["items"], step.window["replayed"]) == (4, 4)


def test_void_groups_are_replaced(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    for _ in range(2):
        run_advance(run.pk)
    lost = RolloutGroup.objects.filter(run=run).order_by("position").first()
    groups_discard(reasons={lost.pk: "the world broke"}, to=GroupState.VOIDED)
    run_advance(run.pk)
    assert RolloutGroup.objects.filter(run=run).exclude(state=GroupState.VOIDED).count() == 2


def test_a_replay_that_never_works_fails_the_run(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    for _ in range(12):
        run_advance(run.pk)
        alive = RolloutGroup.objects.filter(run=run).exclude(state=GroupState.VOIDED)
        groups_discard(reasons={group.pk: "the world broke" for group in alive}, to=GroupState.VOIDED)
    run.refresh_from_db()
    assert run.state == RunState.FAILED
    assert "the world broke" in run.state_reason


def test_answers_withdrawn_meanwhile_are_made_up_for_by_later_ones(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world)
    for _ in range(2):
        run_advance(run.pk)
    first = world.lane.generations.order_by("created_at").first()
    world.lane.generations.filter(id=first.id).update(consent="none")
    answered(world, store, 3, first=10)
    Simulation(run, random.Random(1), misbehaviour=0.0).go(rounds=400)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED, run.state_reason
    assert run.steps.get().window["items"] == 6


def test_what_is_to_be_replayed_must_be_there(store):
    world = catalogued()
    with pytest.raises(Invalid, match="no task set"):
        start(world, task_set="chess")
    with pytest.raises(Invalid, match="no environment"):
        start(world, environment="chess")


def test_without_a_share_nothing_is_pinned_and_no_cluster_is_touched(store):
    world = catalogued()
    answered(world, store, 4)
    run = start(world, share=0.0)
    for _ in range(3):
        run_advance(run.pk)
    stage = Stage.objects.get(run=run)
    assert (stage.state, stage.task_set_id, stage.rubric_version_id) == (StageState.RUNNING, None, None)
    assert not ReplicaSlot.objects.filter(replica__cluster__slug="east", desired_version__isnull=False).exists()
    assert run.steps.get().window["replayed"] == 0
