"""Decisions of a simulated RL stage: evaluate before, keep rollouts coming, batch what is ready, evaluate after."""

from __future__ import annotations

from django.db.models import Count, Max, Q

from controlplane.conductor.context import StageContext
from controlplane.conductor.curriculum import next_draws
from controlplane.conductor.staleness import Intake, staleness
from controlplane.models import Evaluation, Event, ReplicaSlot, RolloutGroup, RubricVersion, Step, TaskSet
from controlplane.selectors.run_clusters import sessions_lent
from controlplane.selectors.task_sets import proof_problem, task_set_named
from controlplane.services.evaluations import evaluation_request
from controlplane.services.events import CONDUCTOR, run_topic
from controlplane.services.groups import IN_FLIGHT, groups_admit, groups_discard
from controlplane.services.runs import run_fail, run_note, stage_move
from controlplane.services.steps import step_batch
from controlplane.states import (
    DesiredSource,
    EvaluationState,
    EventType,
    GroupState,
    RunState,
    StageState,
    StepState,
    WeightSlot,
)
from rl_core.specs import RlStage

VOIDS_IN_A_ROW = 6
DRAWS_AMONG_THEM = 3


def rl_stage_start(context: StageContext) -> None:
    """Pin the task set (its newest version, if the spec names none) and the newest rubric, and start."""
    spec = rl_spec(context)
    project = context.run.project
    task_set = task_set_named(project, spec.task_set)
    rubric = RubricVersion.objects.filter(rubric__project=project, rubric__slug=spec.rubric).order_by("-number").first()
    if task_set is None or rubric is None:
        what = f"task set {spec.task_set!r}" if task_set is None else f"rubric {spec.rubric!r}"
        run_fail(run=context.run, actor=CONDUCTOR, reason=f"{what} is gone; create it again and resume")
        return
    if held_back(context, task_set):
        return
    stage_move(stage=context.stage, to=StageState.RUNNING, actor=CONDUCTOR, task_set=task_set, rubric_version=rubric)


def held_back(context: StageContext, task_set: TaskSet) -> bool:
    """Whether a task set keeps the stage from starting: its proof is under way (the run says so), or refused it."""
    problem, final = proof_problem(task_set)
    if final:
        run_fail(run=context.run, actor=CONDUCTOR, reason=problem)
    elif problem or context.run.state_reason.startswith("waits for the proof"):
        run_note(run=context.run, reason=problem)
    return bool(problem)


def rl_stage_advance(context: StageContext) -> None:
    """One look at the stage. Discards come first: they alone touch rows that workers may hold."""
    spec = rl_spec(context)
    if context.run.state != RunState.RUNNING:
        return
    if hopeless(context):
        return
    _drop_stale(context, spec)
    published = context.stage.steps.filter(state=StepState.PUBLISHED).count()
    if published >= spec.steps:
        _finish(context, spec, published)
        return
    _batch(context, spec)
    _admit(context, spec, published)
    _evaluate(context, spec, published)


def rl_spec(context: StageContext) -> RlStage:
    """The stage's part of the spec."""
    spec = context.spec.stages[context.stage.position]
    if not isinstance(spec, RlStage):
        raise TypeError(f"stage {context.stage.position} of run {context.run.pk} is not an RL stage")
    return spec


def hopeless(context: StageContext) -> bool:
    """Fail the run when one group after another is void since it last began to run: admitting more cannot help.

    Of more than a task or two, that is: those come back a few times, and are let go.
    """
    ended = context.stage.groups.filter(finished_at__isnull=False).order_by("-finished_at")[:VOIDS_IN_A_ROW]
    last = list(ended.values_list("state", "finished_at", "reason", "draw"))
    if len(last) < VOIDS_IN_A_ROW or any(state != GroupState.VOIDED for state, _, _, _ in last):
        return False
    if len({draw for _, _, _, draw in last}) < DRAWS_AMONG_THEM:
        return False
    began = Event.objects.filter(
        topic_id=run_topic(context.run.pk), type=EventType.RUN_CHANGED, data__state=RunState.RUNNING.value
    ).aggregate(at=Max("at"))["at"]
    if began is not None and last[-1][1] <= began:
        return False
    reason = f"the last {VOIDS_IN_A_ROW} groups are void; mend the cause and resume. {last[0][2]}"
    run_fail(run=context.run, actor=CONDUCTOR, reason=reason)
    return True


def _drop_stale(context: StageContext, spec: RlStage) -> None:
    """Groups whose oldest token is past the bound, time in the queue included. Their places are admitted anew."""
    oldest_allowed = context.head.number - spec.max_staleness
    stale = context.stage.groups.filter(
        state__in=[GroupState.SCORING, GroupState.READY], oldest_version__number__lt=oldest_allowed
    ).values_list("pk", "oldest_version__number")
    reasons = {}
    for group_id, oldest_number in stale:
        age = staleness(head_number=context.head.number, oldest_number=oldest_number)
        reasons[group_id] = f"{age} versions behind the head; the bound is {spec.max_staleness}"
    groups_discard(reasons=reasons, to=GroupState.DROPPED)


def _batch(context: StageContext, spec: RlStage) -> Step | None:
    """The P ready groups that were drawn first become the next step, unless one is in flight."""
    if context.run.steps.exclude(state=StepState.PUBLISHED).exists():
        return None
    ready = context.stage.groups.filter(state=GroupState.READY).select_related("run").order_by("draw")
    groups = list(ready[: spec.prompts_per_step])
    if len(groups) < spec.prompts_per_step:
        return None
    return step_batch(run=context.run, stage=context.stage, groups=groups)


def _admit(context: StageContext, spec: RlStage, published: int) -> list[RolloutGroup]:
    counts = context.stage.groups.aggregate(
        running=Count("pk", filter=Q(state__in=IN_FLIGHT)),
        accepted=Count("pk", filter=Q(state__in=[GroupState.READY, GroupState.CONSUMED])),
    )
    sessions = sum(cluster.capacity for cluster in context.clusters) + sessions_lent(context.run)
    intake = Intake(
        steps=spec.steps,
        prompts_per_step=spec.prompts_per_step,
        max_staleness=spec.max_staleness,
        max_concurrent=max(1, sessions // spec.group_size),
        version=published - _lag(context),
        running=counts["running"],
        accepted=counts["accepted"],
    )
    if intake.capacity == 0:
        return []
    return groups_admit(
        run=context.run,
        stage=context.stage,
        draws=next_draws(
            context,
            intake.capacity,
            prompts_per_step=spec.prompts_per_step,
            lag=spec.max_staleness,
            spec=spec.curriculum,
        ),
        size=spec.group_size,
        version=context.head,
        run_seed=context.spec.seed,
    )


def _lag(context: StageContext) -> int:
    """Versions by which the newest replica is behind the head: its transfer runs, or an evaluation holds it back.

    What is admitted meanwhile is sampled from that older version, and must count from there: else half of what a bound
    of one admits right after a step is over the bound when its turn comes.
    """
    newest = ReplicaSlot.objects.filter(
        replica__cluster__in=context.clusters,
        slot=WeightSlot.DEFAULT.value,
        desired_source=DesiredSource.TRAINING_HEAD,
        current_version__lineage_id=context.run.lineage_id,
    ).aggregate(number=Max("current_version__number"))["number"]
    return 0 if newest is None else max(0, context.head.number - newest)


def _evaluate(context: StageContext, spec: RlStage, published: int) -> None:
    """Before the first step, and every `eval_every` steps."""
    if published == 0 or (spec.eval_every and published % spec.eval_every == 0):
        _request(context, spec, published)


def _request(context: StageContext, spec: RlStage, published: int) -> Evaluation:
    stage = context.stage
    if stage.task_set is None or stage.rubric_version is None:
        raise RuntimeError(f"stage {stage.pk} runs without a task set or a rubric")
    last = stage.steps.filter(state=StepState.PUBLISHED).order_by("-number").select_related("version").first()
    version = last.version if last and last.version else context.head
    return evaluation_request(
        project=context.run.project,
        version=version,
        task_set=stage.task_set,
        rubric_version=stage.rubric_version,
        task_count=spec.eval_tasks,
        temperature=spec.eval_temperature,
        run=context.run,
        step_number=last.number if last else version.number,
    )


def _finish(context: StageContext, spec: RlStage, published: int) -> None:
    """All steps are published: what is left over is dropped, the final version evaluated, the stage completed."""
    left_over = context.stage.groups.filter(state__in=[*IN_FLIGHT, GroupState.READY]).values_list("pk", flat=True)
    groups_discard(reasons=dict.fromkeys(left_over, "the stage has all its steps"), to=GroupState.DROPPED)
    evaluation = _request(context, spec, published)
    if evaluation.state == EvaluationState.DONE:
        open_ones = Evaluation.objects.filter(run=context.run, state__in=_OPEN)
        if not open_ones.exists():
            stage_move(stage=context.stage, to=StageState.COMPLETED, actor=CONDUCTOR)


_OPEN = [EvaluationState.PENDING, EvaluationState.RUNNING]
