"""Which arm of a lane answers a user: the same one for as long as a canary lasts, whoever asks and whenever.

Nothing is stored: the arm follows from the release's salt and the user's hash. As the share rises users only ever move
to the canary, and a restart changes nothing. Whoever sends no user key gets the promoted version, outside the
experiment.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from dataclasses import dataclass

from controlplane.states import Arm


@dataclass(frozen=True, slots=True)
class Experiment:
    """A canary as an assignment needs it. `step` is the position of the step that is open, or was the last."""

    release_id: uuid.UUID
    salt: str
    share: float
    step: int | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm that answers, and the experiment in which its answer counts (none: outside any)."""

    arm: Arm
    release_id: uuid.UUID | None = None
    canary_step: int | None = None


def bucket_of(salt: str, user_hash: str) -> float:
    """The user's place in [0, 1) under a release's salt: uniform, and independent of every other release's."""
    digest = hmac.new(salt.encode(), user_hash.encode(), hashlib.sha256).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def arm_assign(experiment: Experiment | None, *, user_hash: str) -> Assignment:
    """The arm of a user, who is known by their hash under the lane's salt (empty: unknown)."""
    if experiment is None or not user_hash:
        return Assignment(Arm.PROMOTED)
    canary = bucket_of(experiment.salt, user_hash) < experiment.share
    return Assignment(Arm.CANARY if canary else Arm.PROMOTED, experiment.release_id, experiment.step)
