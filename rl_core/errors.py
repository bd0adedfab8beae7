"""Every error rl_core raises on purpose.

RlCoreError
├── SpecError                a configuration that cannot be run
├── TrajectoryError          a trajectory blob that does not decode or does not add up
├── ModelError               a model folder or a set of weights that is none
├── EngineError              generation
│   ├── EngineBusy           the queue is full; try again later
│   ├── VersionUnavailable   the wanted policy version is not (or not yet) here
│   ├── EngineUnreachable    the engine did not answer
│   └── RequestRefused       the request itself is wrong
├── WeightsError             containers and deltas
│   ├── ManifestError        a manifest that is malformed or of an unknown format
│   ├── BaseMismatch         a delta meets weights it was not made from
│   └── DigestMismatch       bytes or weights are not what their digest says
├── StoreError               the object store
│   ├── ObjectExists         create-only: the key is taken
│   ├── ObjectMissing        nothing under the key
│   └── StoreUnavailable     the store did not answer, or has no space left
├── TrainerError             a step that cannot be taken
│   ├── CheckpointError      a checkpoint that is torn, or is of another run
│   └── TrainerLost          the trainer process is gone or is not where it is expected
├── SignalError              what users did cannot be read as a signal
│   └── JudgeFailed          a judge did not answer, or gave no verdict
└── EnvironmentFault         a rollout that failed, with whose fault it was
    ├── TaskSetError         a task set that does not validate
    ├── WorldError           a world that does not start or does not answer
    └── SandboxRefused       a required layer of isolation is missing

`code` is stable and machine-readable; `retryable` says whether the same call may succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class RlCoreError(Exception):
    """Base of the tree. The message says what is wrong and what to do next."""

    code: ClassVar[str] = "rl_core_error"
    retryable: ClassVar[bool] = False


class SpecError(RlCoreError, ValueError):
    """A configuration with an unknown key, a wrong type or a value out of range."""

    code = "spec_invalid"


class TrajectoryError(RlCoreError, ValueError):
    """A trajectory blob that does not decode, or whose lengths do not agree."""

    code = "trajectory_invalid"


class ModelError(RlCoreError, ValueError):
    """A model folder that is none, or weights that do not fit it."""

    code = "model_invalid"


class EngineError(RlCoreError, RuntimeError):
    """Generation failed."""

    code = "engine_error"


class EngineBusy(EngineError):
    """The engine's queue is full (HTTP 429)."""

    code = "engine_busy"
    retryable = True


class VersionUnavailable(EngineError):
    """`min_version` or `exact_version` is not served here (HTTP 409)."""

    code = "version_unavailable"
    retryable = True


class EngineUnreachable(EngineError, ConnectionError):
    """The engine did not answer, or went away while answering."""

    code = "engine_unreachable"
    retryable = True


class RequestRefused(EngineError, ValueError):
    """The request is malformed or too long for the model (HTTP 400)."""

    code = "request_refused"


class WeightsError(RlCoreError):
    """Weights, deltas and their containers."""

    code = "weights_error"


class ManifestError(WeightsError, ValueError):
    """A manifest that is malformed or of a format this build does not know."""

    code = "manifest_invalid"


class BaseMismatch(WeightsError, ValueError):
    """The weights at hand are not the base that the delta names. Nothing was applied."""

    code = "base_mismatch"


class DigestMismatch(WeightsError, ValueError):
    """Bytes, a frame or the weights are not what their digest says. Nothing was applied."""

    code = "digest_mismatch"
    retryable = True


class StoreError(RlCoreError, OSError):
    """The object store."""

    code = "store_error"
    retryable = True


class ObjectExists(StoreError):
    """The key is taken: objects are created once and never overwritten."""

    code = "object_exists"
    retryable = False


class ObjectMissing(StoreError):
    """Nothing is stored under the key."""

    code = "object_missing"
    retryable = False


class StoreUnavailable(StoreError):
    """The store did not answer, refused the write, or has no space left."""

    code = "store_unavailable"


class TrainerError(RlCoreError, RuntimeError):
    """A training step that cannot be taken."""

    code = "trainer_error"


class CheckpointError(TrainerError):
    """A checkpoint that is torn, missing, or of another run."""

    code = "checkpoint_invalid"


class TrainerLost(TrainerError):
    """The trainer process ended, or stands at another (run, epoch, step, fence) than expected."""

    code = "trainer_lost"
    retryable = True


class EnvironmentFault(RlCoreError, RuntimeError):
    """A rollout failed for a reason that is not the policy's."""

    code = "environment_fault"
    retryable = True


class TaskSetError(EnvironmentFault, ValueError):
    """A task set that does not validate; the message names the line."""

    code = "task_set_invalid"
    retryable = False


class WorldError(EnvironmentFault):
    """A world that does not start, does not answer, or broke off."""

    code = "world_error"


class SandboxRefused(EnvironmentFault):
    """A required layer of isolation is missing; the message says how to enable it."""

    code = "sandbox_refused"
    retryable = False


class SignalError(RlCoreError, ValueError):
    """What a user did cannot be read as a signal."""

    code = "signal_unreadable"


class JudgeFailed(SignalError):
    """A judge did not answer in time, or its answer holds no verdict. Never a score."""

    code = "judge_failed"
    retryable = True
