"""Which tasks a stage draws next: what was lost comes back first, then the curriculum goes on."""

from __future__ import annotations

from collections.abc import Mapping

from django.db.models import Count, F, Q, Sum

from controlplane.conductor.context import StageContext
from controlplane.models import Rollout, Task
from controlplane.services.groups import LOST, TRIES_OF_A_DRAW, Draw
from controlplane.states import StepState
from rl_core.curriculum import Course, Tries, draws_of_step
from rl_core.specs import CurriculumKind, CurriculumSpec
from rl_core.types import Split


def next_draws(
    context: StageContext, count: int, *, prompts_per_step: int, lag: int = 0, spec: CurriculumSpec | None = None
) -> list[Draw]:
    """`count` draws: those whose group was voided or grew too old, oldest first, then the sequence's next.

    A task is not left out because its world failed or its attempts were slow: what is trained on would be biased
    towards tasks that are quick and run anywhere. After TRIES_OF_A_DRAW groups a draw is let go.

    What the draws of step `s` look at is what the stage's first `s - lag` steps consumed: published by the time that
    admission reaches them when `lag` is the stage's staleness bound, so that it does not matter when they are admitted.
    """
    again = lost_draws(context)[:count]
    first = context.stage.draws
    places = range(first, first + count - len(again))
    course = _course(context, prompts_per_step, spec or CurriculumSpec())
    by_tries = course.spec.kind is not CurriculumKind.UNIFORM
    known: dict[int, list[int]] = {}
    for step in sorted({place // prompts_per_step for place in places}):
        tries = tries_of(context, steps=step - lag) if by_tries else {}
        known[step] = draws_of_step(course, step, tries)
    positions = {place: known[place // prompts_per_step][place % prompts_per_step] for place in places}
    rows = Task.objects.filter(task_set=context.stage.task_set, split=Split.TRAIN.value)
    tasks = {task.position: task for task in rows.filter(position__in=set(positions.values()))}
    return [*again, *(Draw(place, tasks[position]) for place, position in positions.items())]


def lost_draws(context: StageContext) -> list[Draw]:
    """Draws that are to come back: every group of theirs is lost, and not too many were."""
    groups = context.stage.groups
    rows = groups.filter(state__in=LOST).exclude(draw__in=groups.exclude(state__in=LOST).values("draw"))
    counted = rows.values("draw", "task_id").annotate(tries=Count("pk")).filter(tries__lt=TRIES_OF_A_DRAW)
    wanted = {row["draw"]: row["task_id"] for row in counted.order_by("draw")}
    tasks = Task.objects.in_bulk(set(wanted.values()))
    return [Draw(number, tasks[task_id]) for number, task_id in wanted.items()]


def tries_of(context: StageContext, *, steps: int) -> Mapping[int, Tries]:
    """What the stage's first `steps` steps consumed of each task, by the task's position."""
    first = context.stage.steps.order_by("number").values_list("number", flat=True).first()
    if steps <= 0 or first is None:
        return {}
    rows = Rollout.objects.filter(
        Q(group__stage=context.stage, group__step__state=StepState.PUBLISHED, group__step__number__lt=first + steps)
    ).values("group__task__position")
    summed = rows.annotate(attempts=Count("pk"), rewards=Sum("reward"), squares=Sum(F("reward") * F("reward")))
    return {row["group__task__position"]: Tries(row["attempts"], row["rewards"], row["squares"]) for row in summed}


def _course(context: StageContext, prompts_per_step: int, spec: CurriculumSpec) -> Course:
    if context.stage.task_set is None:
        raise RuntimeError(f"stage {context.stage.pk} runs without a task set")
    return Course(
        seed=context.spec.seed,
        stage=context.stage.position,
        prompts_per_step=prompts_per_step,
        tasks=context.stage.task_set.train_count,
        spec=spec,
    )
