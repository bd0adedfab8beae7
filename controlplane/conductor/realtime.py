"""Decisions of a real-time stage: one window of production generations becomes one batch and one candidate version."""

from __future__ import annotations

from controlplane.conductor.context import StageContext
from controlplane.errors import NotFound
from controlplane.services.events import CONDUCTOR
from controlplane.services.runs import run_fail, run_note, stage_move
from controlplane.services.steps import BatchEntry, step_create, step_event
from controlplane.services.windows import lane_named, window_collect
from controlplane.states import RunState, StageState, StepState
from rl_core.specs import RealtimeStage

WINDOW_GROUP = "window"


def realtime_stage_start(context: StageContext) -> None:
    """Start, if the lane is still there."""
    try:
        lane_named(project=context.run.project, slug=realtime_spec(context).lane)
    except NotFound as error:
        run_fail(run=context.run, actor=CONDUCTOR, reason=str(error))
        return
    stage_move(stage=context.stage, to=StageState.RUNNING, actor=CONDUCTOR)


def realtime_stage_advance(context: StageContext) -> None:
    """Fix the batch once enough users have answered; complete when its version is published."""
    if context.run.state != RunState.RUNNING:
        return
    step = context.stage.steps.order_by("number").last()
    if step is None:
        _batch(context)
    elif step.state == StepState.PUBLISHED:
        stage_move(stage=context.stage, to=StageState.COMPLETED, actor=CONDUCTOR)


def realtime_spec(context: StageContext) -> RealtimeStage:
    """The stage's part of the spec."""
    spec = context.spec.stages[context.stage.position]
    if not isinstance(spec, RealtimeStage):
        raise TypeError(f"stage {context.stage.position} of run {context.run.pk} is not a real-time stage")
    return spec


def _batch(context: StageContext) -> None:
    """The whole window is one group: its baseline is the mean of all who answered."""
    spec = realtime_spec(context)
    try:
        window = window_collect(lane=lane_named(project=context.run.project, slug=spec.lane))
    except NotFound as error:
        run_note(run=context.run, reason=str(error))
        return
    if len(window.items) < spec.minimum_answers:
        run_note(run=context.run, reason=f"waits for answers: {len(window.items)} of {spec.minimum_answers}")
        return
    entries = [
        BatchEntry(
            group_key=WINDOW_GROUP,
            reward=item.reward,
            trajectory_key=item.generation.content_key,
            generation_id=item.generation.id,
        )
        for item in window.items
    ]
    step = step_create(run=context.run, stage=context.stage, entries=entries)
    step_event(step, CONDUCTOR, window=len(entries), silent=window.silent, without_consent=window.without_consent)
    run_note(run=context.run, reason="")
