"""A real-time stage through the conductor: waits for answers, makes one batch, completes with its version."""

from __future__ import annotations

import pytest
from django.db.models.functions import Now

from controlplane.conductor import run_advance
from controlplane.conductor.shipping import advance_lanes
from controlplane.models import (
    Evaluation,
    Event,
    Feedback,
    Generation,
    Lane,
    MetricPoint,
    Release,
    ReplicaSlot,
    RolloutGroup,
    Run,
    Transfer,
    WorkUnit,
)
from controlplane.selectors.batches import batch_rows
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.feedback import feedback_receive
from controlplane.services.releases import release_propose
from controlplane.services.signals import signal_map_publish
from controlplane.services.steps import step_begin, step_publish, step_version_begin
from controlplane.services.versions import PublishedWeights
from controlplane.services.windows import lane_train, window_collect
from controlplane.services.work import work_claim
from controlplane.states import (
    Consent,
    EvaluationState,
    EventType,
    FeedbackState,
    GroupState,
    ReleaseState,
    RunState,
    WorkKind,
)
from rl_core.environments import word_problems
from rl_core.store import open_store
from tests.lane_rows import ACTOR, candidate_version, lane_world, person, thumbs

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


def test_a_step_says_what_its_window_held_and_what_each_answer_is_worth(store):
    world = catalogued()
    answered(world, store, 4)
    silent = world.generate(store, user_key="quiet")
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides={"minimum_answers": 4})
    for _ in range(3):
        run_advance(run.pk)
    step = run.steps.get()
    items = list(step.batch.order_by("position"))
    assert [item.advantage for item in items] == [0.5, -0.5, 0.5, -0.5]
    assert sum(item.weight for item in items) == pytest.approx(4.0)
    assert {(item.objective, item.group_key, item.feedback_id) for item in items} == {
        ("policy_gradient", "window", None)
    }
    assert silent.id not in {item.generation_id for item in items}
    assert step.window["left_out"] == {"silent": 1}
    assert (step.window["answered"], step.window["eligible"], step.window["replayed"]) == (4, 5, 0)
    points = dict(MetricPoint.objects.filter(run=run, step=1).values_list("name", "value"))
    assert points["window_answers"] == 4
    assert points["window_response_rate"] == pytest.approx(0.8)
    assert points["window_on_policy_share"] == 1.0
    assert points["window_left_out/silent"] == 1
    assert points["window_effective_answers"] <= 4
    event = Event.objects.filter(type=EventType.STEP_CHANGED, data__step=str(step.pk)).latest("id")
    assert event.data["window"] == step.window


def test_a_stage_that_would_train_another_version_than_answers_fails(store):
    """The lane was given another version after the run was made: its answers are not this run's policy's."""
    world = catalogued()
    answered(world, store, 4)
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides={"minimum_answers": 4})
    Lane.objects.filter(pk=world.lane.pk).update(promoted_version=candidate_version(world))
    for _ in range(3):
        run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.FAILED
    assert "other weights than this stage starts from" in run.state_reason
    assert not run.steps.exists()


def test_a_run_says_that_horizons_are_open(store):
    world = catalogued()
    content = {"signals": {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}, "horizon_s": 3600.0}
    signal_map_publish(project=world.project, content=content, author=None, actor=ACTOR)
    answered(world, store, 2)
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides={"minimum_answers": 2})
    for _ in range(3):
        run_advance(run.pk)
    run.refresh_from_db()
    assert run.state_reason == "waits for answers: 0 of 2; the horizon of 2 generations is open"


def test_what_is_erased_or_withdrawn_after_the_batch_was_fixed_is_not_sent_to_the_trainer(store):
    world = catalogued()
    answered(world, store, 4)
    for number in (5, 6):
        shown = world.generate(store, user_key=f"user-{number}")
        body = thumbs(shown.id, value=False, demonstration=f"Better {number}.")
        feedback_receive(project=world.project, sender="k", source=None, data=body, actor=ACTOR)
    run = lane_train(lane=world.lane, name="window", actor=ACTOR, user=None, overrides={"minimum_answers": 4})
    for _ in range(3):
        run_advance(run.pk)
    step = run.steps.get()
    rows = batch_rows(step)
    assert [row.demonstration for row in rows] == ["", "", "", "", "Better 5.", "Better 6."]
    first, second, *_, fifth, _ = [row.item for row in rows]
    Generation.objects.filter(id=first.generation_id).update(erased_at=Now())
    Generation.objects.filter(id=second.generation_id).update(consent=Consent.NONE)
    Feedback.objects.filter(id=fifth.feedback_id).update(state=FeedbackState.RETRACTED, demonstration="")
    left = batch_rows(step)
    assert [row.item.position for row in left] == [2, 3, 5]
    assert [row.demonstration for row in left] == ["", "", "Better 6."]


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
                draw=position,
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
