"""A real-time stage through the conductor: waits for answers, makes one batch, completes with its version."""

from __future__ import annotations

import pytest

from controlplane.conductor import run_advance
from controlplane.conductor.shipping import advance_lanes
from controlplane.models import Evaluation, Release, ReplicaSlot, RolloutGroup, Run, Transfer, WorkUnit
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.feedback import feedback_receive
from controlplane.services.releases import release_propose
from controlplane.services.steps import step_begin, step_publish, step_version_begin
from controlplane.services.versions import PublishedWeights
from controlplane.services.windows import lane_train, window_collect
from controlplane.services.work import work_claim
from controlplane.states import EvaluationState, GroupState, ReleaseState, RunState, WorkKind
from rl_core.environments import word_problems
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, person, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def catalogued():
    """A lane in a project that has the word problems to gate on."""
    world = lane_world()
    task_set_create(
        project=world.project,
        slug="word-problems",
        environment="word-problems",
        tasks=word_problems.build_task_set(),
        actor=ACTOR,
    )
    criteria = [{"key": "right", "text": "states the number", "kind": "final_number_right", "weight": 1.0}]
    rubric_publish(project=world.project, slug="word-problems", criteria=criteria, author=None, note="", actor=ACTOR)
    return world


def answered(world, store, count):
    for number in range(count):
        generation = world.generate(store, user_key=f"user-{number}")
        body = thumbs(generation.id, value=number % 2 == 0)
        feedback_receive(project=world.project, sender="k", source=None, data=body, actor=ACTOR)


def train_once(run):
    """Play the train worker: claim the step, publish a version."""
    unit = WorkUnit.objects.get(run=run, kind=WorkKind.TRAIN)
    claim = work_claim(unit_id=unit.pk, worker="test")
    assert claim is not None
    step = step_begin(claim)
    assert step is not None
    version = step_version_begin(claim, step=step)
    weights = PublishedWeights(
        root="d" * 64, manifest_key="m.json", delta_bytes=10, full_bytes=100, changed_elements=1, elements=10
    )
    return step_publish(claim, step=step, version=version, weights=weights, metrics={"loss": 1.0})


def test_a_window_becomes_one_batch_and_one_version(store):
    world = catalogued()
    answered(world, store, 3)
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides={"minimum_answers": 4})
    run_advance(run.pk)
    run_advance(run.pk)
    run.refresh_from_db()
    assert (run.state, run.state_reason) == (RunState.RUNNING, "waits for answers: 3 of 4")
    assert not run.steps.exists()
    answered(world, store, 1)
    for _ in range(3):
        run_advance(run.pk)
    step = run.steps.get()
    assert step.batch.count() == 4
    assert sorted(step.batch.values_list("reward", flat=True)) == [0.0, 1.0, 1.0, 1.0]
    assert step.base_version.root == world.lane.promoted_version.root
    assert window_collect(lane=world.lane).items == []
    train_once(run)
    for _ in range(3):
        run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED
    assert run.lineage.head.number == 1


def test_a_release_of_that_version_is_loaded_evaluated_and_judged_on_the_same_tasks(store):
    world = catalogued()
    answered(world, store, 4)
    overrides = {"minimum_answers": 4, "eval_tasks": 3}
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides=overrides)
    for _ in range(3):
        run_advance(run.pk)
    train_once(run)
    run_advance(run.pk)
    run = Run.objects.get(pk=run.pk)
    release = release_propose(
        lane=world.lane,
        version=run.lineage.head,
        run=run,
        proposer=person("ann"),
        actor=ACTOR,
        reason="window of today",
    )
    advance_lanes()
    release.refresh_from_db()
    assert release.state == ReleaseState.GATING
    slot = ReplicaSlot.objects.get(replica=world.replica, slot="candidate")
    assert slot.desired_version == release.version
    assert Transfer.objects.filter(replica=world.replica, slot="candidate", version=release.version).count() == 1
    advance_lanes()
    release.refresh_from_db()
    assert release.gate == {}
    candidate, incumbent = release.candidate_evaluation, release.incumbent_evaluation
    for evaluation, reward in ((candidate, 0.9), (incumbent, 0.4)):
        tasks = evaluation.task_set.tasks.filter(split="heldout").order_by("position")[:3]
        for position, task in enumerate(tasks):
            RolloutGroup.objects.create(
                evaluation=evaluation,
                task=task,
                purpose="evaluation",
                state=GroupState.CONSUMED,
                position=position,
                size=1,
                seed=0,
                admitted_version=evaluation.version,
                mean_reward=reward,
            )
        Evaluation.objects.filter(pk=evaluation.pk).update(state=EvaluationState.DONE, mean_reward=reward)
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert release.gate["verdict"] == "pass"
    assert release.gate["n"] == 3
    assert release.gate["difference"] == pytest.approx(0.5)
    assert (release.gate["candidate_mean"], release.gate["incumbent_mean"]) == (0.9, 0.4)
    revision = release.revision
    advance_lanes()
    release.refresh_from_db()
    assert release.revision == revision
