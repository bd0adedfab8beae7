"""What the conductor decides, rule by rule."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models import Value
from django.db.models.functions import Now

from controlplane.conductor import run_advance
from controlplane.conductor.fleet import slots_reconcile
from controlplane.errors import Conflict
from controlplane.models import (
    BatchItem,
    Evaluation,
    Event,
    PolicyVersion,
    Replica,
    ReplicaSlot,
    RolloutGroup,
    Run,
    TaskSet,
    Transfer,
    WorkUnit,
)
from controlplane.services.locks import run_lock
from controlplane.services.runs import run_fail, run_fork, run_pause, run_resume, run_stop
from controlplane.services.work import work_fail, work_replay
from controlplane.states import (
    EvaluationState,
    EventType,
    GroupPurpose,
    GroupState,
    ReplicaState,
    RolloutState,
    RunState,
    StageState,
    StepState,
    TransferState,
    WorkKind,
    WorkState,
)
from rl_core.errors import SandboxRefused
from tests.domain_factories import TESTER, make_catalog, make_group, make_run, make_spec
from tests.simulated_workers import claim_of, roll_out, score, train, transfer

pytestmark = pytest.mark.django_db
DO = {WorkKind.ROLLOUT: roll_out, WorkKind.SCORE: score, WorkKind.TRANSFER: transfer, WorkKind.TRAIN: train}


def started(**stage) -> Run:
    run = make_run(**stage)
    run_advance(run.pk)
    run_advance(run.pk)  # the evaluation that the first look asked for has its groups now
    run.refresh_from_db()
    return run


def queued(run: Run, kind: WorkKind) -> list[WorkUnit]:
    return list(WorkUnit.objects.filter(project=run.project, kind=kind, state=WorkState.QUEUED).order_by("created_at"))


def do_all(run: Run, *kinds: WorkKind) -> None:
    for kind in kinds:
        for unit in queued(run, kind):
            claim = claim_of(unit)
            assert claim is not None
            DO[kind](claim)


def groups(run: Run, **where) -> list[RolloutGroup]:
    return list(run.groups.filter(purpose=GroupPurpose.TRAIN, **where).order_by("position"))


def first_step(run: Run) -> None:
    """Versions arrive, everything admitted is rolled out and scored, the first step is batched and trained."""
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    do_all(run, WorkKind.TRAIN)


def test_a_run_starts_pins_what_it_learns_from_and_admits_what_staleness_allows():
    run = started(prompts_per_step=2, max_staleness=1)
    stage = run.stages.get()
    assert (run.state, stage.state) == (RunState.RUNNING, StageState.RUNNING)
    assert (stage.task_set.slug, stage.rubric_version.number) == ("word-problems", 1)
    # (max_staleness + version + 1) · P, with room for more on the clusters
    assert [group.position for group in groups(run)] == [0, 1, 2, 3]
    assert {group.rollouts.count() for group in groups(run)} == {2}
    evaluation = run.evaluations.get()
    assert (evaluation.version, evaluation.step_number) == (run.lineage.head, 0)
    assert {t.version_id for t in Transfer.objects.all()} == {run.lineage.head_id}


def test_a_newer_task_set_does_not_change_a_stage_that_has_started():
    run = started()
    make_catalog(run.project, train=20)
    assert TaskSet.objects.filter(project=run.project).count() == 2
    run_advance(run.pk)
    assert run.stages.get().task_set.version == 1


def test_looking_many_times_is_looking_once():
    run = started()
    run_advance(run.pk)

    def everything() -> list[int]:
        tables = (RolloutGroup, WorkUnit, Transfer, Evaluation, Event, PolicyVersion, BatchItem)
        return [table.objects.count() for table in tables]

    before = everything()
    for _ in range(5):
        run_advance(run.pk)
        slots_reconcile()
    assert everything() == before


def test_admission_is_bounded_by_the_clusters():
    run = make_run(group_size=8, prompts_per_step=2, max_staleness=4)
    run_advance(run.pk)
    assert len(groups(run)) == 2  # two clusters of eight sessions, eight attempts a group


def test_tasks_come_in_the_order_of_the_seed():
    orders = []
    for seed in (7, 7, 8):
        spec = make_spec(max_staleness=5, group_size=2, prompts_per_step=2) | {"seed": seed}
        run = make_run(spec=spec)
        run_advance(run.pk)
        orders.append([group.task.key for group in groups(run)])
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[0])) == len(orders[0])


def test_p_fresh_groups_become_one_step_and_only_one_is_in_flight():
    run = started(prompts_per_step=2)
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    run_advance(run.pk)
    step = run.steps.get()
    assert (step.number, step.state, step.base_version) == (1, StepState.BATCHED, run.lineage.head)
    assert [group.position for group in groups(run, state=GroupState.CONSUMED)] == [0, 1]
    assert step.batch.count() == 4
    do_all(run, WorkKind.TRAIN)
    run_advance(run.pk)
    assert run.steps.count() == 2


def test_replicas_stay_with_the_evaluation_before_and_follow_the_head_after():
    run = started(eval_tasks=3)
    do_all(run, WorkKind.TRANSFER)
    for group in groups(run)[:2]:
        roll_out(claim_of(WorkUnit.objects.get(ref=group.pk)))
    do_all(run, WorkKind.SCORE)
    run_advance(run.pk)
    do_all(run, WorkKind.TRAIN)
    run_advance(run.pk)
    first, head = run.evaluations.get(step_number=0).version, PolicyVersion.objects.get(number=1)
    slots = ReplicaSlot.objects.filter(replica__cluster__project=run.project)
    assert {slot.desired_version for slot in slots} == {first}
    # what is admitted meanwhile is sampled from the older version and counts from there
    assert len(groups(run)) == 4
    do_all(run, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    run_advance(run.pk)
    assert run.evaluations.get(step_number=0).state == EvaluationState.DONE
    assert {slot.desired_version for slot in slots.all()} == {head}


@pytest.mark.parametrize(("bound", "kept"), [(1, False), (2, True)])
def test_groups_past_the_staleness_bound_are_dropped_and_admitted_anew(bound, kept):
    run = started(prompts_per_step=2, max_staleness=bound, steps=6)
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    for _ in range(2):
        run_advance(run.pk)
        do_all(run, WorkKind.TRAIN)
    first, head = (PolicyVersion.objects.get(lineage=run.lineage, number=number) for number in (0, 2))
    late = make_group(run, state=GroupState.READY, oldest_version=first, position=999)
    RolloutGroup.objects.filter(run=run, state=GroupState.READY).exclude(pk=late.pk).delete()
    run_advance(run.pk)
    late.refresh_from_db()
    assert (late.state == GroupState.READY) is kept
    if not kept:
        assert late.reason == "2 versions behind the head; the bound is 1"
    run_advance(run.pk)  # the replicas follow the head now
    used = [GroupState.READY, GroupState.CONSUMED, GroupState.ADMITTED]
    assert len(groups(run, state__in=used)) < (bound + head.number + 1) * 2, "counted from what the replicas still hold"
    do_all(run, WorkKind.TRANSFER)
    run_advance(run.pk)  # they have arrived, and admission counts from there
    assert len(groups(run, state__in=used)) == (bound + head.number + 1) * 2


def test_a_paused_run_admits_and_steps_nothing_but_publishes_what_is_under_way():
    run = started(prompts_per_step=2)
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    run = run_pause(run=run, actor=TESTER, reason="lunch")
    do_all(run, WorkKind.TRAIN)
    before = len(groups(run))
    run_advance(run.pk)
    assert (run.steps.count(), len(groups(run))) == (1, before)
    assert run.steps.get().state == StepState.PUBLISHED
    head = PolicyVersion.objects.get(number=1)
    assert {slot.desired_version for slot in ReplicaSlot.objects.all()} == {head}
    run = run_resume(run=run, actor=TESTER, reason="back")
    run_advance(run.pk)
    assert run.steps.count() == 2


def test_a_stopped_run_cancels_its_work_and_refuses_who_still_works():
    run = started()
    do_all(run, WorkKind.TRANSFER)
    claim = claim_of(queued(run, WorkKind.ROLLOUT)[0])
    run = run_stop(run=run, actor=TESTER, reason="wrong model")
    assert (run.state, run.state_reason) == (RunState.STOPPED, "wrong model")
    assert not WorkUnit.objects.filter(run=run, state__in=[WorkState.QUEUED, WorkState.LEASED]).exists()
    assert {group.state for group in groups(run)} == {GroupState.DROPPED}
    from controlplane.errors import StaleFence

    with pytest.raises(StaleFence):
        roll_out(claim)
    assert run_advance(run.pk)
    assert run.stages.get().state == StageState.FAILED


def test_a_dead_step_fails_the_run_and_resume_replays_it():
    run = started()
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    claim = claim_of(queued(run, WorkKind.TRAIN)[0])
    work_fail(claim, SandboxRefused("no such luck"))
    run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.FAILED
    assert "no such luck" in run.state_reason
    run = run_resume(run=run, actor=TESTER, reason="mended")
    assert (run.state, run.stages.get().state) == (RunState.RUNNING, StageState.RUNNING)
    do_all(run, WorkKind.TRAIN)
    run_advance(run.pk)
    assert run.steps.get(number=1).state == StepState.PUBLISHED
    assert Event.objects.filter(type=EventType.WORK_REPLAYED).count() == 1


def test_a_group_whose_work_died_is_void_and_its_place_admitted_anew():
    run = started()
    victim = groups(run)[0]
    work_fail(claim_of(WorkUnit.objects.get(ref=victim.pk)), SandboxRefused("no namespaces"))
    run_advance(run.pk)
    victim.refresh_from_db()
    assert (victim.state, victim.reason) == (GroupState.VOIDED, "rollout died: no namespaces")
    assert [group.position for group in groups(run, state=GroupState.ADMITTED)] == [1, 2, 3, 4]


def test_one_void_group_after_another_fails_the_run_and_a_resume_tries_again():
    run = started()
    for _ in range(20):
        run_advance(run.pk)
        run.refresh_from_db()
        if run.state == RunState.FAILED:
            break
        unit = WorkUnit.objects.filter(ref__in=[g.pk for g in groups(run, state=GroupState.ADMITTED)]).first()
        work_fail(claim_of(unit), SandboxRefused("no namespaces"))
    assert run.state == RunState.FAILED
    assert len(groups(run, state=GroupState.VOIDED)) == 6
    assert "no namespaces" in run.state_reason
    run = run_resume(run=run, actor=TESTER, reason="enabled them")
    run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.RUNNING


def test_a_dead_evaluation_fails_the_run_until_it_is_replayed():
    run = started()
    evaluated = run.groups.filter(purpose=GroupPurpose.EVALUATION).first()
    unit = WorkUnit.objects.get(ref=evaluated.pk)
    work_fail(claim_of(unit), SandboxRefused("no"))
    run_advance(run.pk)
    run.refresh_from_db()
    assert (run.state, run.evaluations.get().state) == (RunState.FAILED, EvaluationState.FAILED)
    unit.refresh_from_db()
    work_replay(unit=unit, actor=TESTER, reason="mended")
    run = run_resume(run=run, actor=TESTER, reason="mended")
    run_advance(run.pk)
    do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    assert run.evaluations.get(step_number=0).state == EvaluationState.DONE


def test_two_runs_do_not_share_a_cluster():
    first = started()
    second = make_run(first.project)
    run_advance(second.pk)
    second.refresh_from_db()
    assert second.state == RunState.PENDING
    assert "waits for run" in second.state_reason
    run_stop(run=first, actor=TESTER, reason="enough")
    run_advance(second.pk)
    second.refresh_from_db()
    assert (second.state, second.state_reason) == (RunState.RUNNING, "")


def test_a_replica_that_came_back_with_other_weights_is_targeted_again():
    run = started()
    do_all(run, WorkKind.TRANSFER)
    slot = ReplicaSlot.objects.first()
    ReplicaSlot.objects.filter(pk=slot.pk).update(current_version=None, current_root="f" * 64)
    assert slots_reconcile() == 0  # what was seen may be older than the transfer that has just ended
    Transfer.objects.update(finished_at=Now() - Value(timedelta(seconds=60)))
    assert slots_reconcile() == 1
    assert slots_reconcile() == 0  # its transfer is on the way
    do_all(run, WorkKind.TRANSFER)
    slot.refresh_from_db()
    assert slot.current_version == slot.desired_version


def test_nothing_is_sent_to_a_replica_that_does_not_answer():
    run = make_run()
    Replica.objects.update(state=ReplicaState.OFFLINE)
    run_advance(run.pk)
    assert not Transfer.objects.exists()
    Replica.objects.update(state=ReplicaState.READY)
    run_advance(run.pk)
    assert Transfer.objects.filter(state=TransferState.PENDING).count() == 2


def test_a_fork_starts_at_the_weights_after_a_step():
    run = started()
    first_step(run)
    run.refresh_from_db()
    version = run.steps.get(number=1).version
    overrides = {"seed": 11}
    fork = run_fork(run=run, step_number=1, name="a fork", overrides=overrides, actor=TESTER)
    first = fork.lineage.head
    assert (first.number, first.root, first.parent, fork.lineage.parent) == (0, version.root, version, version)
    assert fork.spec == run.spec | overrides


def test_the_whole_stage_ends_with_an_evaluation_of_the_final_version():
    run = started(steps=1)
    first_step(run)
    for _ in range(4):
        run_advance(run.pk)
        do_all(run, WorkKind.TRANSFER, WorkKind.ROLLOUT, WorkKind.SCORE)
    run_advance(run.pk)
    run.refresh_from_db()
    assert run.state == RunState.COMPLETED
    assert sorted(run.evaluations.values_list("step_number", "state")) == [(0, "done"), (1, "done")]
    assert not RolloutGroup.objects.filter(run=run, rollouts__state=RolloutState.RUNNING).exists()


@pytest.mark.django_db(transaction=True)
def test_of_two_conductors_one_decides_and_the_other_goes_on():
    run = make_run()
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                run_lock(run.pk)
                holding.set()
                assert release.wait(60)
        finally:
            connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    assert run_advance(run.pk) is False
    assert not run.groups.exists()
    release.set()
    thread.join()
    assert run_advance(run.pk) is True


@pytest.mark.django_db(transaction=True)
def test_conductors_side_by_side_admit_each_place_once():
    run = make_run()
    barrier = threading.Barrier(4)

    def advance() -> None:
        barrier.wait()
        try:
            for _ in range(5):
                run_advance(run.pk)
        finally:
            connection.close()

    threads = [threading.Thread(target=advance) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [group.position for group in groups(run)] == [0, 1, 2, 3]
    assert run.evaluations.count() == 1
    assert Transfer.objects.count() == 2


def test_a_failed_run_does_not_come_back_onto_clusters_that_another_has_now():
    first = started()
    run_fail(run=first, actor=TESTER, reason="for the test")
    second = make_run(first.project)
    run_advance(second.pk)
    with pytest.raises(Conflict, match="on the same clusters"):
        run_resume(run=first, actor=TESTER, reason="mended")
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.state, second.state) == (RunState.FAILED, RunState.RUNNING)
    run_stop(run=second, actor=TESTER, reason="enough")
    assert run_resume(run=first, actor=TESTER, reason="mended").state == RunState.RUNNING


@pytest.mark.django_db(transaction=True)
def test_of_two_conductors_one_starts_a_run_on_the_same_clusters():
    first = make_run()
    second = make_run(first.project)

    def look() -> None:
        try:
            run_advance(second.pk)
        finally:
            connection.close()

    with transaction.atomic():
        run_advance(first.pk)  # started, and nobody sees it yet
        other = threading.Thread(target=look)
        other.start()
        other.join(60)
    assert not other.is_alive()
    run_advance(second.pk)
    states = dict(Run.objects.values_list("pk", "state"))
    assert (states[first.pk], states[second.pk]) == (RunState.RUNNING, RunState.PENDING)


def test_a_run_whose_head_was_found_bad_says_so_and_stands_still():
    run = started()
    PolicyVersion.objects.filter(pk=run.lineage.head_id).update(quarantined_at=Now())
    ReplicaSlot.objects.update(desired_version=None, desired_source="")
    for look in ("the first", "and once more after a resume"):
        run_advance(run.pk)
        run.refresh_from_db()
        assert run.state == RunState.FAILED, look
        assert "was found bad" in run.state_reason
        run_resume(run=run, actor=TESTER, reason="try it")
        run.refresh_from_db()
