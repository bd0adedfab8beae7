"""Where tools act. A world answers tool calls; it knows nothing of turns, tokens or rewards.

Both worlds here keep no state between calls: every call names its task, and a sandboxed call runs in a fresh
sandbox. One world serves any number of sessions at once, and a session can go on in another process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from rl_core.environments.tasks import Task
from rl_core.sandbox.protocol import Sandbox

MAX_RESULT_CHARS = 400


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool answered. `solved` ends the episode; `artifacts` is what graders will see, as data."""

    text: str
    ok: bool
    solved: bool = False
    artifacts: dict[str, str] = {}


class World(Protocol):
    """What a harness needs of a world."""

    async def call(self, *, task: Task, tool: str, arguments: str) -> ToolResult:
        """Answer one tool call. The policy's mistakes are results with `ok` false.

        Raises: WorldError when the world itself fails; the call may be made again.
        """
        ...


LocalTool = Callable[[Task, str], ToolResult]
SandboxTool = Callable[[Sandbox, Task, str], Awaitable[ToolResult]]


class LocalTools:
    """A world of pure functions in this process: for tools that parse data and never run code."""

    def __init__(self, tools: Mapping[str, LocalTool]) -> None:
        self._tools = dict(tools)

    async def call(self, *, task: Task, tool: str, arguments: str) -> ToolResult:
        """See World."""
        function = self._tools.get(tool)
        return _bounded(function(task, arguments)) if function else _unknown(tool)


class SandboxWorld:
    """A world whose tools run model-written code through sandboxd."""

    def __init__(self, sandbox: Sandbox, tools: Mapping[str, SandboxTool]) -> None:
        self._sandbox = sandbox
        self._tools = dict(tools)

    async def call(self, *, task: Task, tool: str, arguments: str) -> ToolResult:
        """See World."""
        function = self._tools.get(tool)
        return _bounded(await function(self._sandbox, task, arguments)) if function else _unknown(tool)


def _unknown(tool: str) -> ToolResult:
    return ToolResult(text=f"Error: there is no tool named {tool[:40]!r}", ok=False)


def _bounded(result: ToolResult) -> ToolResult:
    if len(result.text) <= MAX_RESULT_CHARS:
        return result
    return msgspec.structs.replace(result, text=result.text[:MAX_RESULT_CHARS] + " …")
