"""Runs: created from a spec, paused, resumed, stopped, forked."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db import transaction
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.models import (
    Cluster,
    Evaluation,
    Lane,
    ModelCard,
    PolicyVersion,
    Project,
    RubricVersion,
    Run,
    Stage,
    Step,
    User,
    WorkUnit,
)
from controlplane.selectors.environments import environment_of, environments_of
from controlplane.selectors.run_clusters import run_holding_clusters_of
from controlplane.selectors.task_sets import proof_problem, task_set_named
from controlplane.services.events import Actor, conductor_nudge, event_append, run_topic
from controlplane.services.groups import groups_drop_all
from controlplane.services.locks import clusters_lock, run_lock
from controlplane.services.transitions import sources_of, transition
from controlplane.services.versions import lineage_create
from controlplane.services.window_returns import returned_note, window_return
from controlplane.services.work import work_cancel, work_replay
from controlplane.states import (
    EvaluationState,
    EventType,
    RunState,
    StageState,
    StepState,
    VersionState,
    WorkKind,
    WorkState,
)
from rl_core.environments.criteria.kinds import CriterionKind
from rl_core.errors import SpecError
from rl_core.specs import RealtimeStage, RlStage, RunSpec, parse_run_spec, resolve_run_spec
from rl_core.types import ClusterRole, StageKind


def run_create(
    *,
    project: Project,
    name: str,
    spec: dict[str, Any],
    actor: Actor,
    user: User | None = None,
    parent_version: PolicyVersion | None = None,
) -> Run:
    """Create a run: the spec validated and saved resolved, its lineage with version 0 committed, its stages.

    The conductor starts it. With `parent_version` the lineage starts at that version's weights.
    Raises: Invalid, naming the field, when the spec does not validate or names what is not there.
    """
    if not name.strip():
        raise Invalid("a run needs a name", "name")
    parsed = _parse(spec)
    model = ModelCard.objects.filter(project=project, slug=parsed.model).first()
    if model is None:
        known = ", ".join(ModelCard.objects.filter(project=project).values_list("slug", flat=True)) or "none yet"
        raise Invalid(f"there is no model {parsed.model!r} in this project; known: {known}", "spec.model")
    _check_names(project, parsed)
    if parent_version is not None and parent_version.state != VersionState.COMMITTED:
        raise Invalid(f"version {parent_version.ref} is not committed: nothing can start from it", "parent_version")
    with transaction.atomic():
        run = Run.objects.create(
            project=project,
            name=name.strip()[:200],
            spec=_as_json(resolve_run_spec(parsed)),
            lineage=lineage_create(project=project, model=model, parent=parent_version),
            created_by=user,
        )
        resolved = run.spec["stages"]
        Stage.objects.bulk_create(
            Stage(run=run, position=position, kind=_kind_of(stage).value, spec=resolved[position])
            for position, stage in enumerate(parsed.stages)
        )
        data = {"name": run.name, "parent_version": str(parent_version.ref) if parent_version else ""}
        run_event(run, EventType.RUN_CREATED, actor, data)
        conductor_nudge()
    return run


def run_pause(*, run: Run, actor: Actor, reason: str) -> Run:
    """No new groups and no new steps; what is under way goes on to its end. Raises: Conflict."""
    with transaction.atomic():
        run_lock(run.pk)
        return run_move(run=run, to=RunState.PAUSED, actor=actor, reason=reason)


def run_resume(*, run: Run, actor: Actor, reason: str) -> Run:
    """Go on with a paused or failed run; a failed run's dead letters that stopped it are replayed.

    Raises: Conflict, also while another run has the clusters that a failed run gave up.
    """
    with transaction.atomic():
        run_lock(run.pk)
        if run.state == RunState.FAILED:
            _take_clusters(run)
            for unit in blocking_letters(run):
                work_replay(unit=unit, actor=actor, reason=reason)
            for stage in run.stages.filter(state=StageState.FAILED):
                stage_move(stage=stage, to=StageState.RUNNING, actor=actor, reason=reason)
        return run_move(run=run, to=RunState.RUNNING, actor=actor, reason=reason, finished_at=None)


def run_stop(*, run: Run, actor: Actor, reason: str) -> Run:
    """End the run for good: its work is cancelled, whoever still works on it is refused. Its window goes back.

    Raises: Conflict.
    """
    with transaction.atomic():
        run_lock(run.pk)
        work_cancel(run=run)
        groups_drop_all(run=run, reason=f"run stopped: {reason}"[:500])
        Step.objects.filter(run=run, state=StepState.BATCHED).update(state=StepState.FAILED)
        PolicyVersion.objects.filter(lineage_id=run.lineage_id, state=VersionState.PUBLISHING).update(
            state=VersionState.ABANDONED
        )
        Evaluation.objects.filter(run=run, state__in=sources_of(EvaluationState.FAILED)).update(
            state=EvaluationState.FAILED, finished_at=Now()
        )
        for stage in run.stages.filter(state=StageState.RUNNING):
            stage_move(stage=stage, to=StageState.FAILED, actor=actor, reason=reason)
        reason += returned_note(window_return(run=run))
        return run_move(run=run, to=RunState.STOPPED, actor=actor, reason=reason, finished_at=Now())


def run_fail(*, run: Run, actor: Actor, reason: str) -> Run:
    """The run cannot go on without a person: say why and stand still. Raises: Conflict."""
    with transaction.atomic():
        for stage in run.stages.filter(state=StageState.RUNNING):
            stage_move(stage=stage, to=StageState.FAILED, actor=actor, reason=reason)
        return run_move(run=run, to=RunState.FAILED, actor=actor, reason=reason, finished_at=Now())


def run_fork(
    *, run: Run, step_number: int, name: str, overrides: dict[str, Any], actor: Actor, user: User | None = None
) -> Run:
    """A new run from the weights after step `step_number` (0: before the first), its spec with `overrides` merged in.

    Objects merge key by key; anything else, lists included, replaces what was there.
    Raises: NotFound when the step has no committed version; Invalid when the merged spec does not validate.
    """
    version = _version_after(run, step_number)
    return run_create(
        project=run.project,
        name=name,
        spec=_merged(run.spec, overrides),
        actor=actor,
        user=user,
        parent_version=version,
    )


def run_move(*, run: Run, to: RunState, actor: Actor, reason: str, **changes: Any) -> Run:
    """Change a run's state, with its event. Raises: Conflict."""
    with transaction.atomic():
        transition(run, to=to, state_reason=reason[:500], **changes)
        run_event(run, EventType.RUN_CHANGED, actor, {"state": run.state}, reason)
        conductor_nudge()
    run.refresh_from_db()
    return run


def run_note(*, run: Run, reason: str) -> None:
    """Say what a run waits for; nothing is written while it says so already."""
    if run.state_reason != reason:
        Run.objects.filter(pk=run.pk).update(state_reason=reason[:500])
        run.state_reason = reason


def stage_move(*, stage: Stage, to: StageState, actor: Actor, reason: str = "", **changes: Any) -> Stage:
    """Change a stage's state, with its event. Raises: Conflict."""
    with transaction.atomic():
        transition(stage, to=to, **changes)
        data = {"stage": str(stage.pk), "position": stage.position, "kind": stage.kind, "state": stage.state}
        run_event(stage.run, EventType.STAGE_CHANGED, actor, data, reason)
    return stage


def run_event(run: Run, event_type: EventType, actor: Actor, data: dict[str, Any], reason: str = "") -> None:
    """Append to the run's log, in the caller's transaction."""
    event_append(
        project_id=run.project_id,
        topic=run_topic(run.pk),
        event_type=event_type,
        actor=actor,
        reason=reason,
        data={"run": str(run.pk), **data},
    )


def _take_clusters(run: Run) -> None:
    clusters_lock(run.project_id)
    other = run_holding_clusters_of(run)
    if other is not None:
        raise Conflict(
            f"run {other.name!r} is {other.state} on the same clusters; resume when it has ended, or stop it"
        )


def blocking_letters(run: Run) -> list[WorkUnit]:
    """Dead letters without which the run cannot go on: its training steps and its evaluations' groups."""
    dead = WorkUnit.objects.filter(run=run, state=WorkState.DEAD)
    evaluated = run.groups.filter(evaluation__isnull=False).values("pk")
    steps = dead.filter(kind=WorkKind.TRAIN)
    return [*steps, *dead.filter(kind__in=[WorkKind.ROLLOUT, WorkKind.SCORE], ref__in=evaluated)]


def _parse(spec: dict[str, Any]) -> RunSpec:
    try:
        return parse_run_spec(spec)
    except SpecError as error:
        raise Invalid(str(error), "spec") from error


def _as_json(data: dict[str, Any]) -> dict[str, Any]:
    """The data as it comes back from a JSON column, so that a fresh row equals a read one."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(data))
    return plain


def _kind_of(stage: RlStage | RealtimeStage) -> StageKind:
    return StageKind.RL if isinstance(stage, RlStage) else StageKind.REALTIME


def _check_names(project: Project, spec: RunSpec) -> None:
    """Everything the spec names is in the project. Raises: Invalid."""
    for slug in spec.rollout_clusters:
        if not Cluster.objects.filter(project=project, slug=slug, role=ClusterRole.ROLLOUT.value).exists():
            raise Invalid(f"there is no rollout cluster {slug!r} in this project", "spec.rollout_clusters")
    for position, stage in enumerate(spec.stages):
        where = f"spec.stages.{position}"
        if isinstance(stage, RlStage):
            _check_learning(project, stage.environment, stage.task_set, stage.rubric, where)
        else:
            if not Lane.objects.filter(project=project, slug=stage.lane).exists():
                raise Invalid(f"there is no lane {stage.lane!r} in this project", f"{where}.lane")
            _check_learning(
                project, stage.evaluation_environment, stage.evaluation_task_set, stage.evaluation_rubric, where
            )
            if stage.rolls_out:
                replay = stage.replay
                _check_learning(project, replay.environment, replay.task_set, replay.rubric, f"{where}.replay")


def _check_learning(project: Project, environment: str, task_set: str, rubric: str, where: str) -> None:
    if environment_of(project.pk, environment) is None:
        known = ", ".join(known.slug for known in environments_of(project.pk))
        raise Invalid(f"there is no environment {environment!r}; known: {known}", where)
    named = task_set_named(project, task_set)
    if named is None:
        raise Invalid(f"there is no task set {task_set!r} in this project", where)
    if named.environment != environment:
        raise Invalid(f"task set {task_set!r} is for environment {named.environment!r}, not {environment!r}", where)
    problem, final = proof_problem(named)
    if final:
        raise Invalid(problem, where)
    version = RubricVersion.objects.filter(rubric__project=project, rubric__slug=rubric).order_by("-number").first()
    if version is None:
        raise Invalid(f"there is no published rubric {rubric!r} in this project", where)
    asking = [row["key"] for row in version.criteria if row["kind"] == CriterionKind.USER_SIGNAL]
    if asking:
        why = "no user answers the rollouts of a run; a lane's signal map says what signals are worth there"
        raise Invalid(f"criterion {asking[0]} of rubric {rubric!r} reads a user's signal, but {why}", where)


def _version_after(run: Run, step_number: int) -> PolicyVersion:
    if step_number == 0:
        version = run.lineage.versions.filter(epoch=0, number=0).first()
    else:
        step = run.steps.filter(number=step_number, state=StepState.PUBLISHED).select_related("version").first()
        version = step.version if step else None
    if version is None:
        raise NotFound(f"run {run.name!r} has no published step {step_number}", "step_number")
    if version.quarantined_at is not None:
        raise Conflict(f"version {version.ref} is quarantined: nothing can start from it")
    return version


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        present = merged.get(key)
        merged[key] = _merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    return merged
