"""The rollout queue: one slice of many sessions."""

from __future__ import annotations

import asyncio

from controlplane.states import WorkKind
from workers.base import Attempt, unit_task
from workers.slices import RolloutSlice


@unit_task(WorkKind.ROLLOUT)
def rollout(attempt: Attempt) -> None:
    """Roll out the claimed group, and further queued ones beside it."""
    asyncio.run(RolloutSlice(attempt.keeper).run(attempt.claim))
