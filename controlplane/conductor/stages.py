"""Which decisions belong to which kind of stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controlplane.conductor.context import StageContext
from controlplane.conductor.realtime import realtime_stage_advance, realtime_stage_start
from controlplane.conductor.rl import rl_stage_advance, rl_stage_start
from rl_core.types import StageKind


@dataclass(frozen=True, slots=True)
class StageLogic:
    """`start` moves a pending stage to running (or fails the run); `advance` is one look at a running one.

    Both are called inside a transaction under the run's lock, any number of times, and keep no state.
    """

    start: Callable[[StageContext], None]
    advance: Callable[[StageContext], None]


STAGES: dict[StageKind, StageLogic] = {
    StageKind.RL: StageLogic(rl_stage_start, rl_stage_advance),
    StageKind.REALTIME: StageLogic(realtime_stage_start, realtime_stage_advance),
}
