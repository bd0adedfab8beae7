"""What comes from the other side, validated: it is somebody else's word, bounded in every way."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from rl_core.environments.remote.protocol import MAX_TEXT_CHARS, Kind, SessionState
from rl_core.environments.tasks import has_nul
from rl_core.types import Ending, Fault

MAX_SCORES = 100
MAX_TOOLS = 128
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TOOL = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a remote world; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not _TOOL.fullmatch(self.name):
            raise ValueError(f"tool name {self.name[:40]!r} must be 1 to 64 of a-z, A-Z, 0-9, _ and -")


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What a server offers. `system` is what a world tells the policy at the beginning of every session."""

    kind: Kind
    system: str = ""
    tools: list[ToolDescription] = []
    example: dict[str, Any] = {}

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(self.system) > MAX_TEXT_CHARS:
            raise ValueError(f"system has at most {MAX_TEXT_CHARS} characters")
        if has_nul(msgspec.to_builtins(self)):
            raise ValueError("a description must have no NUL characters")
        if len(names) > MAX_TOOLS or len(set(names)) < len(names):
            raise ValueError(f"at most {MAX_TOOLS} tools, each name once")
        if (self.kind is Kind.WORLD) != bool(names):
            raise ValueError("a world has tools, an environment has none of ours")


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A world that is open. `next` is the number of its next step."""

    handle: str
    lease_s: float
    next: int


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool answered."""

    text: str
    ok: bool
    solved: bool = False
    artifacts: dict[str, str] = {}

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT_CHARS:
            raise ValueError(f"a tool's text has at most {MAX_TEXT_CHARS} characters")


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What graders may see of a world."""

    artifacts: dict[str, str]


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """The world is closed."""

    closed: bool


class ResultError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a session has no result, and whose fault that is. A failure of the policy is a result of 0, not an error."""

    fault: Fault
    message: str = ""

    def __post_init__(self) -> None:
        if self.fault is Fault.POLICY:
            raise ValueError("a failure of the policy is a reward, not an error")
        if has_nul(self.message):
            raise ValueError("the message of an error must have no NUL characters")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a session: a reward or scores by name, each in [0, 1]; or an error."""

    reward: float | None = None
    scores: dict[str, float] = {}
    ending: Ending = Ending.TERMINATED
    error: ResultError | None = None

    def __post_init__(self) -> None:
        if (self.error is None) == (self.reward is None and not self.scores):
            raise ValueError("a result has a reward or scores, or an error, and not both")
        if len(self.scores) > MAX_SCORES or not all(_NAME.fullmatch(name) for name in self.scores):
            raise ValueError(f"at most {MAX_SCORES} scores, named by lower-case letters, digits and _")
        for name, value in self.reported.items():
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ValueError(f"{name} must be in [0, 1], not {value}")

    @property
    def reported(self) -> dict[str, float]:
        """All that was reported, the reward under `reward`: a score of that name stands back."""
        return {**self.scores, **({} if self.reward is None else {"reward": self.reward})}


class SessionTold(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session of an environment stands."""

    session: str
    state: SessionState
    result: Result | None = None

    def __post_init__(self) -> None:
        if (self.state is SessionState.ENDED) != (self.result is not None):
            raise ValueError("a session has a result exactly when it has ended")


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """`session.result`, as it arrives at the callback."""

    version: int
    type: str
    session: str
    result: Result


class ErrorTold(msgspec.Struct, frozen=True, kw_only=True):
    """The error of an answer."""

    code: str
    message: str = ""
    expected: int | None = None
    versions: list[int] = []
