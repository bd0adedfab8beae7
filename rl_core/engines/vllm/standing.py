"""What follows from the words of vLLM's workers: whether they may generate, and why they do not hold a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rl_core.engines.protocol import TargetBody
from rl_core.engines.vllm.messages import WorkerStatus
from rl_core.errors import (
    BaseMismatch,
    DigestMismatch,
    EngineError,
    ManifestError,
    ModelError,
    ObjectMissing,
    RlCoreError,
    StoreUnavailable,
)

# What a worker gave a target up for, as the error that it was there.
_ERRORS: Final[dict[str | None, type[RlCoreError]]] = {
    kind.code: kind
    for kind in (BaseMismatch, DigestMismatch, ManifestError, ModelError, ObjectMissing, StoreUnavailable)
}


def sound(workers: Sequence[WorkerStatus]) -> bool:
    """Whether all of them hold one whole version, each its part of it."""
    return len({(worker.version, worker.root) for worker in workers}) == 1 and not any(
        worker.damaged for worker in workers
    )


def holds(worker: WorkerStatus, target: TargetBody) -> bool:
    """Whether the target is what the worker's model holds."""
    return (worker.version, worker.root) == (target.version, target.root) and not worker.damaged


def given_up(worker: WorkerStatus) -> RlCoreError:
    """Why a worker does not hold what it was given."""
    message = worker.error or f"a worker is {worker.state} after it was given a target"
    return _ERRORS.get(worker.error_code, EngineError)(message)
