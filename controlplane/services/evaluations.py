"""Evaluations: one version, the first tasks of a held-out split, one attempt each, scored by one rubric."""

from __future__ import annotations

import uuid

from django.db import transaction
from django.db.models import Avg, Exists, OuterRef, Q
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid
from controlplane.models import Evaluation, PolicyVersion, Project, RolloutGroup, RubricVersion, Run, TaskSet, WorkUnit
from controlplane.services.events import CONDUCTOR, conductor_nudge, event_append, project_topic, run_topic
from controlplane.services.groups import evaluation_groups_admit
from controlplane.services.metrics import Metric, metrics_record
from controlplane.services.retention import version_hold
from controlplane.services.transitions import transition
from controlplane.states import EvaluationState, EventType, GroupState, VersionState, WorkKind, WorkState
from rl_core.types import Split

_GIVEN_UP = [GroupState.DROPPED, GroupState.VOIDED]
_KINDS = [WorkKind.ROLLOUT, WorkKind.SCORE]  # of work on groups; units are found by kind and ref


def evaluation_request(
    *,
    project: Project,
    version: PolicyVersion,
    task_set: TaskSet,
    rubric_version: RubricVersion,
    task_count: int,
    temperature: float = 0.0,
    run: Run | None = None,
    step_number: int | None = None,
) -> Evaluation:
    """Want a version evaluated; the same question asked again is the same evaluation. The conductor carries it out.

    One that failed with its run, whose groups were given up, begins anew for whoever asks again. It needs a replica
    that holds the version in any slot; targeting one is the caller's part.
    Raises: Invalid for a count below one; Conflict for a version that is not committed, or retired.
    """
    if task_count < 1:
        raise Invalid(f"an evaluation needs at least one task, not {task_count}", "task_count")
    if version.state != VersionState.COMMITTED:
        raise Conflict(f"version {version.ref} is {version.state}: only a committed version can be evaluated")
    with transaction.atomic():
        version_hold(version)
        evaluation, created = Evaluation.objects.get_or_create(
            version=version,
            task_set=task_set,
            rubric_version=rubric_version,
            task_count=min(task_count, task_set.heldout_count),
            temperature=temperature,
            defaults={"project": project, "run": run, "step_number": step_number},
        )
        if created or _begun_anew(evaluation):
            _event(evaluation)
            conductor_nudge()
    return evaluation


def evaluation_advance(evaluation_id: uuid.UUID) -> Evaluation:
    """Take an evaluation as far as the rows allow: admit its groups, or finish it, or say that it cannot go on.

    Safe to call any number of times, from anywhere.
    """
    with transaction.atomic():
        evaluation = (
            Evaluation.objects.select_for_update(of=("self",))
            .select_related("run", "project", "version", "task_set")
            .get(pk=evaluation_id)
        )
        state = EvaluationState(evaluation.state)
        if state == EvaluationState.PENDING:
            _start(evaluation)
        elif state == EvaluationState.RUNNING:
            _finish_or_fail(evaluation)
        elif state == EvaluationState.FAILED and _revivable(evaluation):
            transition(evaluation, to=EvaluationState.PENDING, finished_at=None)
            _start(evaluation)
    return evaluation


def evaluations_open() -> list[uuid.UUID]:
    """Evaluations to look at: those that go on, and failed ones outside a run whose dead letters were replayed.

    A run's own failed ones are looked at with the run.
    """
    going = Q(state__in=[EvaluationState.PENDING, EvaluationState.RUNNING])
    groups = RolloutGroup.objects.filter(evaluation=OuterRef(OuterRef("pk"))).values("pk")
    dead = WorkUnit.objects.filter(kind__in=_KINDS, ref__in=groups, state=WorkState.DEAD)
    lost = RolloutGroup.objects.filter(evaluation=OuterRef("pk"), state__in=_GIVEN_UP)
    revived = Q(~Exists(dead), ~Exists(lost), state=EvaluationState.FAILED, run=None)
    return list(Evaluation.objects.filter(going | revived).order_by("created_at").values_list("pk", flat=True))


def _begun_anew(evaluation: Evaluation) -> bool:
    """Forget what a failed evaluation had, where groups of it were given up; whether it did."""
    if evaluation.state != EvaluationState.FAILED:
        return False
    row = Evaluation.objects.select_for_update().get(pk=evaluation.pk)
    if row.state != EvaluationState.FAILED or not row.groups.filter(state__in=_GIVEN_UP).exists():
        return False
    WorkUnit.objects.filter(kind__in=_KINDS, ref__in=row.groups.values("pk")).delete()
    row.groups.all().delete()
    transition(evaluation, to=EvaluationState.PENDING, finished_at=None)
    return True


def _start(evaluation: Evaluation) -> None:
    if not evaluation.groups.exists():
        tasks = evaluation.task_set.tasks.filter(split=Split.HELDOUT.value, position__lt=evaluation.task_count)
        evaluation_groups_admit(
            evaluation=evaluation, project=evaluation.project, tasks=list(tasks.order_by("position"))
        )
    transition(evaluation, to=EvaluationState.RUNNING)
    _event(evaluation)


def _finish_or_fail(evaluation: Evaluation) -> None:
    dead = _dead_units(evaluation)
    if dead:
        transition(evaluation, to=EvaluationState.FAILED, finished_at=Now())
        _event(evaluation, reason=f"{len(dead)} attempts died: {dead[0].error}"[:500])
        return
    groups = evaluation.groups.all()
    if groups.exclude(state=GroupState.READY).exists():
        return
    mean = groups.aggregate(mean=Avg("mean_reward"))["mean"]
    groups.update(state=GroupState.CONSUMED)
    transition(evaluation, to=EvaluationState.DONE, mean_reward=mean, finished_at=Now())
    if evaluation.run is not None and evaluation.step_number is not None:
        metrics_record(
            run=evaluation.run,
            values={Metric.HELDOUT_REWARD: mean},
            step=evaluation.step_number,
            actor=CONDUCTOR,
        )
    _event(evaluation)
    conductor_nudge()


def _revivable(evaluation: Evaluation) -> bool:
    """Whether a failed evaluation can go on: its dead letters were replayed, and none of its groups was given up."""
    return not _dead_units(evaluation) and not evaluation.groups.filter(state__in=_GIVEN_UP).exists()


def _dead_units(evaluation: Evaluation) -> list[WorkUnit]:
    groups = RolloutGroup.objects.filter(evaluation=evaluation).values("pk")
    dead = WorkUnit.objects.filter(kind__in=_KINDS, ref__in=groups, state=WorkState.DEAD)
    return list(dead.order_by("finished_at")[:100])


def _event(evaluation: Evaluation, reason: str = "") -> None:
    event_append(
        project_id=evaluation.project_id,
        topic=run_topic(evaluation.run_id) if evaluation.run_id else project_topic(evaluation.project_id),
        event_type=EventType.EVALUATION_CHANGED,
        actor=CONDUCTOR,
        reason=reason,
        data={
            "evaluation": str(evaluation.pk),
            "version": str(evaluation.version.ref),
            "state": evaluation.state,
            "mean_reward": evaluation.mean_reward,
            "step_number": evaluation.step_number,
        },
    )
