"""Where tools act. A world answers tool calls; it knows nothing of turns, tokens or rewards.

A world's state is a value: bytes that a session carries from call to call. A session can so go on in another process,
and copying it copies its world. One world object serves any number of sessions at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from rl_core.environments.tasks import Task
from rl_core.sandbox.protocol import Sandbox

MAX_RESULT_CHARS = 400


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool answered. `solved` ends the episode; `artifacts` is what graders will see, as data.

    `state` is the world's state after the call, None where it is unchanged.
    """

    text: str
    ok: bool
    solved: bool = False
    artifacts: dict[str, str] = {}
    state: bytes | None = None


class World(Protocol):
    """What a harness needs of a world. Every method raises WorldError when the world itself fails."""

    async def open(self, *, task: Task, key: str) -> bytes:
        """The state in which a session begins. `key` names the session: opening twice is opening once."""
        ...

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """Answer one tool call, whose arguments fit the tool's schema, from `state` on.

        The policy's mistakes are results with `ok` false. `step` names the call: the same step from the same state is
        the same call made again, and must not act twice.
        """
        ...

    async def export(self, *, task: Task, state: bytes) -> dict[str, str]:
        """What graders may see of the state in which a session ended, as data."""
        ...

    async def close(self, *, task: Task, state: bytes) -> None:
        """The session is over and written down. Closing twice is closing once."""
        ...


LocalTool = Callable[[Task, dict[str, Any]], ToolResult]
SandboxTool = Callable[[Sandbox, Task, dict[str, Any]], Awaitable[ToolResult]]


class Stateless:
    """The half of a world that is the same for all whose calls leave nothing behind."""

    async def open(self, *, task: Task, key: str) -> bytes:
        """See World."""
        return b""

    async def export(self, *, task: Task, state: bytes) -> dict[str, str]:
        """See World: results of calls brought their artefacts already."""
        return {}

    async def close(self, *, task: Task, state: bytes) -> None:
        """See World."""


class LocalTools(Stateless):
    """A world of pure functions in this process: for tools that parse data and never run code."""

    def __init__(self, tools: Mapping[str, LocalTool]) -> None:
        self._tools = dict(tools)

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """See World."""
        return _bounded(self._tools[tool](task, arguments))


class SandboxWorld(Stateless):
    """A world whose tools run model-written code through sandboxd, each call in a fresh sandbox."""

    def __init__(self, sandbox: Sandbox, tools: Mapping[str, SandboxTool]) -> None:
        self._sandbox = sandbox
        self._tools = dict(tools)

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """See World."""
        return _bounded(await self._tools[tool](self._sandbox, task, arguments))


def _bounded(result: ToolResult) -> ToolResult:
    if len(result.text) <= MAX_RESULT_CHARS:
        return result
    return msgspec.structs.replace(result, text=result.text[:MAX_RESULT_CHARS] + " …")
