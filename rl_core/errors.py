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
│   ├── StoreUnavailable     the store did not answer, or has no space left
│   └── StoreUnsuitable      a store that overwrites, or cannot do what is needed
├── TrainerError             a step that cannot be taken
│   ├── CheckpointError      a checkpoint that is torn, or is of another run
│   └── TrainerLost          the trainer process is gone or is not where it is expected
├── BuildRefused             a repository of which no working environment can be made
├── DestinationRefused       a URL that may not be asked
├── DestinationUnreached     nobody answered there, or not within the bounds
│   └── AnswerTooLarge       more came than is read
├── SignalError              what users did cannot be read as a signal
│   └── JudgeFailed          a judge did not answer, or gave no verdict
└── EnvironmentFault         a rollout that failed, with whose fault it was
    ├── TaskSetError         a task set that does not validate
    ├── PatchRefused         what a world exported is no patch
    ├── GraderFailed         a grader beside the world did not answer, or gave no verdict
    ├── GraderRefused        a grader cannot be asked as the rubric has it
    ├── RemoteProtocolError  a remote that answers otherwise than the protocol says
    ├── RemoteEnded          a remote session whose lease is over, or that its server forgot
    ├── RemoteFailed         a remote environment that reported its own failure
    ├── WorldError           a world that does not start or does not answer
    │   ├── RemoteUnreachable   a remote that does not answer
    │   ├── RemoteBusy          a remote that asks for patience, longer than there is
    │   └── RemoteDiverged      a remote world that went on otherwise than its session did
    └── SandboxRefused       a required layer of isolation is missing

`code` is stable and machine-readable; `retryable` says whether the same call may succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class RlCoreError(Exception):
    """Base of the tree. The message says what is wrong and what to do next."""

    code: ClassVar[str] = "rl_core_error"
    retryable: ClassVar[bool] = False

    def __str__(self) -> str:
        """The message as every store takes it: what it quotes may have NUL characters or lone surrogates."""
        return super().__str__().encode("utf-8", "replace").decode().replace("\0", "\ufffd")


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


class StoreUnsuitable(StoreError):
    """The store overwrites what must be created once, or does not do what is asked of it at all."""

    code = "store_unsuitable"
    retryable = False


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


class PatchRefused(EnvironmentFault, ValueError):
    """What a world exported is not the changes of a file tree, or over the bounds of a patch."""

    code = "patch_refused"
    retryable = False


class GraderFailed(EnvironmentFault):
    """A judge, a remote grader or a signal gave no verdict. Never a score; the same call may succeed later."""

    code = "grader_failed"


class GraderRefused(EnvironmentFault, ValueError):
    """A grader that cannot be asked as its rubric has it: where it is, its secret, or its parameters are wrong."""

    code = "grader_refused"
    retryable = False


class WorldError(EnvironmentFault):
    """A world that does not start, does not answer, or broke off."""

    code = "world_error"


class SandboxRefused(EnvironmentFault):
    """A required layer of isolation is missing; the message says how to enable it."""

    code = "sandbox_refused"
    retryable = False


class BuildRefused(RlCoreError, ValueError):
    """A repository of which no working environment can be made; the message says why."""

    code = "build_refused"


class DestinationRefused(RlCoreError, ValueError):
    """A URL that leads where messages of ours may not go. Nothing was sent."""

    code = "destination_refused"


class DestinationUnreached(RlCoreError, ConnectionError):
    """A name that does not resolve, no answer in time, or one over its bound."""

    code = "destination_unreached"
    retryable = True


class AnswerTooLarge(DestinationUnreached):
    """Somebody answered with more than is read of them."""

    code = "answer_too_large"
    retryable = False


class RemoteProtocolError(EnvironmentFault):
    """A remote world or environment that is of another version, unsigned, out of order, or answers what cannot be."""

    code = "remote_protocol"


class RemoteEnded(EnvironmentFault):
    """A remote session outlived its lease, was closed, or is unknown to its server by now."""

    code = "remote_ended"


class RemoteFailed(EnvironmentFault):
    """A remote environment says that it failed, or its own code raised."""

    code = "remote_failed"


class RemoteUnreachable(WorldError):
    """A remote world or environment did not answer in time, or broke off."""

    code = "remote_unreachable"


class RemoteBusy(WorldError):
    """A remote world or environment asked for patience (HTTP 429, 503) for longer than there was."""

    code = "remote_busy"


class RemoteDiverged(WorldError):
    """A remote world took another step than this session's: a turn was played again otherwise, or the session copied.

    It cannot go on from here, and begins again.
    """

    code = "remote_diverged"
    retryable = False


class SignalError(RlCoreError, ValueError):
    """What a user did cannot be read as a signal."""

    code = "signal_unreadable"


class JudgeFailed(SignalError):
    """A judge did not answer in time, or its answer holds no verdict. Never a score."""

    code = "judge_failed"
    retryable = True


class Interrupted(Exception):
    """Work that whoever asked for it wants no longer. Not a failure: nobody is told of it as one."""


def bare(error: RlCoreError) -> RlCoreError:
    """The error without its traceback: one that is kept would keep the frames that it passed, and their weights."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error
