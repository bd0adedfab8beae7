"""A run's summary from hand-made rows, by value."""

import pytest

from controlplane.models import Evaluation, Lineage, PolicyVersion, Replica, ReplicaSlot, RolloutGroup, Step, Transfer
from controlplane.selectors.run_summary import run_summary
from controlplane.states import EvaluationState, GroupPurpose, GroupState, StepState, TransferState, VersionState
from tests.domain_factories import make_run

pytestmark = pytest.mark.django_db


def make_step(run, number, rewards):
    head = run.lineage.head
    version = PolicyVersion.objects.create(
        lineage=run.lineage,
        epoch=0,
        number=number,
        parent=head,
        state=VersionState.COMMITTED,
        root=f"{number:064}",
        manifest_key=f"m/{number}",
        full_bytes=1000,
        delta_bytes=10,
        committed_at="2026-01-01T00:00:00Z",
    )
    Lineage.objects.filter(pk=run.lineage_id).update(head=version)
    run.lineage.refresh_from_db()
    stage = run.stages.get()
    step = Step.objects.create(
        run=run, stage=stage, number=number, state=StepState.PUBLISHED, base_version=head, version=version
    )
    for position, reward in enumerate(rewards):
        make_group(run, position=100 * number + position, mean_reward=reward, step=step, state=GroupState.CONSUMED)
    return version


def make_group(run, *, purpose=GroupPurpose.TRAIN, task=None, **values):
    task = task or run.project.task_sets.get().tasks.first()
    return RolloutGroup.objects.create(
        run=run,
        stage=run.stages.get() if purpose == GroupPurpose.TRAIN else None,
        task=task,
        purpose=purpose,
        size=1,
        seed=0,
        admitted_version=run.lineage.head,
        draw=values.get("position", 0),
        **values,
    )


def make_evaluation(run, *, step_number, rewards):
    task_set = run.project.task_sets.get()
    evaluation = Evaluation.objects.create(
        project=run.project,
        run=run,
        version=run.lineage.head,
        task_set=task_set,
        rubric_version=run.project.rubrics.get().versions.get(),
        task_count=len(rewards),
        state=EvaluationState.DONE,
        step_number=step_number,
    )
    for position, (task, reward) in enumerate(zip(task_set.tasks.filter(split="heldout"), rewards, strict=True)):
        make_group(
            run,
            purpose=GroupPurpose.EVALUATION,
            evaluation=evaluation,
            task=task,
            position=position,
            mean_reward=reward,
            state=GroupState.READY,
        )


def ship(run, slug, version, *, fetched, pause_s):
    replica = Replica.objects.get(cluster__slug=slug, cluster__project=run.project)
    Transfer.objects.create(
        replica=replica,
        slot="default",
        version=version,
        state=TransferState.DONE,
        fetched_bytes=fetched,
        full_bytes=1000,
        timings={"pause_s": pause_s},
    )
    ReplicaSlot.objects.filter(replica=replica).update(current_version=version, current_root=version.root)


def test_a_run_without_steps_says_so():
    summary = run_summary(make_run())
    assert (summary.steps, summary.reward, summary.heldout, summary.clusters) == (0, None, None, ())
    assert not summary.gained


def test_a_run_that_learned_is_summed_up():
    run = make_run()
    make_evaluation(run, step_number=0, rewards=[0.0, 0.2, 0.1])
    for number in range(1, 13):
        reward = 0.1 if number <= 5 else 0.5 if number <= 7 else 0.9
        version = make_step(run, number, [reward, reward + 0.05])
        ship(run, "east", version, fetched=10, pause_s=0.01 * number)
    ship(run, "west", version, fetched=40, pause_s=0.5)
    make_evaluation(run, step_number=12, rewards=[0.9, 1.0, 0.8])

    summary = run_summary(run)

    assert (summary.steps, summary.window) == (12, 5)
    assert summary.reward is not None
    assert summary.heldout is not None
    assert summary.reward.before == pytest.approx(0.125)
    assert summary.reward.after == pytest.approx(0.925)
    assert summary.reward.difference.mean == pytest.approx(0.8)
    assert summary.heldout.before == pytest.approx(0.1)
    assert summary.heldout.after == pytest.approx(0.9)
    assert summary.heldout.difference.n == 3
    assert summary.gained
    east, west = summary.clusters
    assert (east.slug, east.versions, east.fetched_bytes, east.full_bytes) == ("east", 12, 120, 12000)
    assert (east.ratio, east.pause_max_s) == (100, pytest.approx(0.12))
    assert east.pause_median_s == pytest.approx(0.065)
    assert (west.versions, west.pause_max_s) == (1, 0.5)
    assert east.at_head
    assert west.at_head


def test_a_replica_with_other_weights_is_not_at_the_head():
    run = make_run()
    first = make_step(run, 1, [0.1])
    second = make_step(run, 2, [0.1])
    ship(run, "east", first, fetched=10, pause_s=0.1)
    ship(run, "west", second, fetched=10, pause_s=0.1)
    east, west = run_summary(run).clusters
    assert not east.at_head
    assert west.at_head


def test_no_change_is_no_gain():
    run = make_run()
    make_evaluation(run, step_number=0, rewards=[0.4, 0.5, 0.6])
    for number in range(1, 5):
        make_step(run, number, [0.5, 0.3])
    make_evaluation(run, step_number=4, rewards=[0.6, 0.5, 0.4])
    summary = run_summary(run)
    assert summary.window == 2
    assert summary.reward is not None
    assert summary.reward.difference.mean == 0
    assert not summary.gained
