"""The one step of a real-time stage: its window, with what each answer is worth, and what is replayed beside it."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from controlplane.models import RolloutGroup, Run, Stage, Step
from controlplane.services.events import CONDUCTOR
from controlplane.services.metrics import WINDOW_LEFT_OUT, Metric, metrics_record
from controlplane.services.steps import BatchEntry, step_create, step_event
from controlplane.services.transitions import transition
from controlplane.services.windows import Window
from controlplane.states import GroupState
from rl_core.windows.advantages import group_advantages

WINDOW_GROUP = "window"


def window_step(*, run: Run, stage: Stage, window: Window, replay: Sequence[RolloutGroup]) -> Step:
    """Fix the batch, consume the replayed groups, and record what the window held.

    Raises: Conflict when anything was taken meanwhile.
    """
    with transaction.atomic():
        replayed = [entry for group in replay for entry in _replayed(group)]
        entries = [*_answers(window), *replayed]
        report = {**window.report(), "replayed": len(replayed)}
        step = step_create(run=run, stage=stage, entries=entries, window=report)
        for group in replay:
            transition(group, to=GroupState.CONSUMED, step=step)
        metrics_record(run=run, values=_series(window, len(replayed)), step=step.number, actor=CONDUCTOR)
        step_event(step, CONDUCTOR, window=report, groups=[str(group.pk) for group in replay])
    return step


def _answers(window: Window) -> list[BatchEntry]:
    return [
        BatchEntry(
            group_key=WINDOW_GROUP,
            reward=item.reward,
            trajectory_key=item.generation.content_key,
            generation_id=item.generation.id,
            objective=item.objective,
            advantage=item.advantage,
            weight=item.weight,
            feedback_id=item.feedback_id,
        )
        for item in window.items
    ]


def _replayed(group: RolloutGroup) -> list[BatchEntry]:
    rollouts = [rollout for rollout in group.rollouts.order_by("attempt") if rollout.reward is not None]
    if not rollouts:
        return []
    advantages = group_advantages([rollout.reward or 0.0 for rollout in rollouts])
    return [
        BatchEntry(
            group_key=str(group.pk),
            reward=rollout.reward or 0.0,
            trajectory_key=rollout.trajectory_key,
            rollout_id=rollout.pk,
            advantage=advantage,
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]


def _series(window: Window, replayed: int) -> dict[str, float]:
    values: dict[str, float | None] = {
        Metric.WINDOW_ANSWERS: window.answers,
        Metric.WINDOW_EFFECTIVE_ANSWERS: window.effective_answers,
        Metric.WINDOW_RESPONSE_RATE: window.response_rate,
        Metric.WINDOW_ON_POLICY: window.on_policy_share,
        Metric.WINDOW_STRATA: window.strata,
        Metric.WINDOW_REPLAYED: replayed,
        **{f"{WINDOW_LEFT_OUT}{reason}": count for reason, count in window.left_out.items()},
    }
    return {name: value for name, value in values.items() if value is not None}
