"""What both sides of the remote protocol share: version, types of messages, bounds, refusals. Standard library."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_TEXT_CHARS: Final = 100_000

Json = dict[str, Any]


class Ask(StrEnum):
    """What a request wants."""

    DESCRIBE = "describe"
    WORLD_OPEN = "world.open"
    WORLD_CALL = "world.call"
    WORLD_EXPORT = "world.export"
    WORLD_CLOSE = "world.close"
    SESSION_START = "session.start"
    SESSION_STATUS = "session.status"
    SESSION_CANCEL = "session.cancel"
    SESSION_RESULT = "session.result"  # from the environment to us, at the callback


class Kind(StrEnum):
    """What a server offers."""

    WORLD = "world"  # tools alone: our harness plays the turns
    ENVIRONMENT = "environment"  # the whole session: it asks our endpoint, and reports the reward


class SessionState(StrEnum):
    """Where a session of an environment stands."""

    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"


class Refusal(StrEnum):
    """Codes of answers that are errors."""

    UNSIGNED = "unsigned"  # 401
    UNSUPPORTED_VERSION = "unsupported_version"  # 400, with `versions`
    MALFORMED = "malformed"  # 400
    UNKNOWN_TYPE = "unknown_type"  # 400
    UNKNOWN = "unknown"  # 404: no such handle or session
    STEP_OUT_OF_ORDER = "step_out_of_order"  # 409, with `expected`
    STEP_CONFLICT = "step_conflict"  # 409: the number was another call
    SESSION_CONFLICT = "session_conflict"  # 409: the id is another task's
    ENDED = "ended"  # 410: closed, or its lease is over
    TOO_LARGE = "too_large"  # 413
    BUSY = "busy"  # 429, with Retry-After
    FAILED = "failed"  # 500: the environment's own code


STATUS: Final[dict[Refusal, int]] = {
    Refusal.UNSIGNED: 401,
    Refusal.UNSUPPORTED_VERSION: 400,
    Refusal.MALFORMED: 400,
    Refusal.UNKNOWN_TYPE: 400,
    Refusal.UNKNOWN: 404,
    Refusal.STEP_OUT_OF_ORDER: 409,
    Refusal.STEP_CONFLICT: 409,
    Refusal.SESSION_CONFLICT: 409,
    Refusal.ENDED: 410,
    Refusal.TOO_LARGE: 413,
    Refusal.BUSY: 429,
    Refusal.FAILED: 500,
}


class Refused(Exception):
    """A request that is answered with an error. `more` are further fields of the error, such as `expected`."""

    def __init__(self, code: Refusal, message: str, *, retry_after_s: float = 0.0, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.body: Json = {"version": VERSION, "error": {"code": code.value, "message": message[:500], **more}}

    @property
    def status(self) -> int:
        """Its HTTP status."""
        return STATUS[self.code]
