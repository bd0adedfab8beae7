"""Where a session stands, written down: blobs first, then the row that names them. And how sessions leave a slice."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from controlplane.services.blobs import blob_put
from controlplane.services.rollouts import (
    RolloutProgress,
    rollout_checkpoint,
    rollout_finish,
    versions_by_text,
)
from controlplane.services.work import Claim
from rl_core.errors import EnvironmentFault
from rl_core.types import Trajectory
from workers.base import store

InDatabase = Callable[[Callable[[], object]], Awaitable[object]]


class Outcome(StrEnum):
    """How a session left the slice."""

    ENDED = "ended"
    PAUSED = "paused"  # the slice's time is over; it goes on from its last turn
    BROKEN = "broken"  # not the policy's fault; the group's next attempt starts it again


@dataclass(slots=True)
class SliceClock:
    """When the slice ends: no turn begins after it."""

    ends_at: float

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return time.monotonic() >= self.ends_at


@dataclass(frozen=True, slots=True)
class ProgressWriter:
    """Writes under one claim, for one run's lineage."""

    claim: Claim
    lineage_id: uuid.UUID

    def write(
        self,
        trajectory: Trajectory,
        *,
        rollout_id: uuid.UUID,
        turns: int,
        session: bytes | None = None,
        replica_id: uuid.UUID | None = None,
    ) -> None:
        """A trajectory with an ending and no session to go on from has ended; any other goes on.

        Raises: StaleFence; EnvironmentFault when a token is of another run's version.
        """
        texts = trajectory.versions()
        versions = versions_by_text(self.lineage_id, texts)
        if len(versions) != len(texts):
            raise EnvironmentFault(f"a replica answered with a version of another run: {', '.join(texts)}")
        ordered = sorted(versions.values(), key=lambda version: (version.epoch, version.number))
        total = sum(len(segment.token_ids) for segment in trajectory.segments)
        progress = RolloutProgress(
            turns=turns,
            sampled_tokens=trajectory.sampled_tokens(),
            prompt_tokens=total - trajectory.sampled_tokens(),
            trajectory_key=blob_put(store(), trajectory.to_bytes()),
            session_key=blob_put(store(), session) if session is not None else "",
            replica_id=replica_id,
            oldest_version=ordered[0] if ordered else None,
            newest_version=ordered[-1] if ordered else None,
        )
        if session is None and trajectory.ending is not None:
            rollout_finish(self.claim, rollout_id=rollout_id, progress=progress, ending=trajectory.ending)
        else:
            rollout_checkpoint(self.claim, rollout_id=rollout_id, progress=progress)
