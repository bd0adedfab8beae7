"""Decisions of a real-time stage: one window of production generations becomes one batch and one candidate version."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from controlplane.conductor.context import StageContext
from controlplane.conductor.replay import replay_asked_at, replay_groups, replay_pinned
from controlplane.errors import NotFound
from controlplane.models import Lane, RolloutGroup
from controlplane.services.events import CONDUCTOR
from controlplane.services.runs import run_fail, run_note, stage_move
from controlplane.services.window_steps import window_step
from controlplane.services.windows import Window, lane_named, window_collect
from controlplane.states import RunState, StageState, StepState
from rl_core.specs import RealtimeStage
from rl_core.windows.selection import LeftOut


def realtime_stage_start(context: StageContext) -> None:
    """Start, if the lane is still there, and what is to be replayed."""
    try:
        lane_named(project=context.run.project, slug=realtime_spec(context).lane)
        pinned = replay_pinned(context, realtime_spec(context).replay)
    except NotFound as error:
        run_fail(run=context.run, actor=CONDUCTOR, reason=str(error))
        return
    stage_move(stage=context.stage, to=StageState.RUNNING, actor=CONDUCTOR, **pinned)


def realtime_stage_advance(context: StageContext) -> None:
    """Fix the batch once enough users have answered; complete when its version is published."""
    if context.run.state != RunState.RUNNING:
        return
    step = context.stage.steps.order_by("number").last()
    if step is None:
        _batch(context, realtime_spec(context))
    elif step.state == StepState.PUBLISHED:
        stage_move(stage=context.stage, to=StageState.COMPLETED, actor=CONDUCTOR)


def realtime_spec(context: StageContext) -> RealtimeStage:
    """The stage's part of the spec."""
    spec = context.spec.stages[context.stage.position]
    if not isinstance(spec, RealtimeStage):
        raise TypeError(f"stage {context.stage.position} of run {context.run.pk} is not a real-time stage")
    return spec


def _batch(context: StageContext, spec: RealtimeStage) -> None:
    """The window as it is, or as it was when the replay was asked for: a batch does not run after its own share."""
    try:
        lane = lane_named(project=context.run.project, slug=spec.lane)
        window = _window(context, spec, lane)
    except NotFound as error:
        run_note(run=context.run, reason=str(error))
        return
    if lane.promoted_version is None or lane.promoted_version.root != context.head.root:
        reason = f"lane {lane.slug} serves {lane.promoted_version}: other weights than this stage starts from"
        run_fail(run=context.run, actor=CONDUCTOR, reason=reason)
        return
    if window.answers < spec.minimum_answers:
        run_note(run=context.run, reason=_waits(window, spec))
        return
    groups = replay_groups(context, spec.replay, attempts=len(window.items))
    if groups is not None:
        _fix(context, window, groups)


def _window(context: StageContext, spec: RealtimeStage, lane: Lane) -> Window:
    asked_at = replay_asked_at(context)
    window = window_collect(lane=lane, stage=spec, until=asked_at)
    if asked_at is not None and window.answers < spec.minimum_answers:  # some was withdrawn meanwhile
        return window_collect(lane=lane, stage=spec)
    return window


def _waits(window: Window, spec: RealtimeStage) -> str:
    reason = f"waits for answers: {window.answers} of {spec.minimum_answers}"
    still_open = window.left_out.get(LeftOut.OPEN, 0)
    return f"{reason}; the horizon of {still_open} generations is open" if still_open else reason


def _fix(context: StageContext, window: Window, groups: Sequence[RolloutGroup]) -> None:
    with transaction.atomic():
        window_step(run=context.run, stage=context.stage, window=window, replay=groups)
        run_note(run=context.run, reason="")
