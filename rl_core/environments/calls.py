"""Making the calls of one turn: in order, those that only read side by side, each with an answer.

A call that cannot be made is answered too: the policy reads why, and the trajectory keeps it as a failed call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import BadCall, Call, Tool
from rl_core.environments.world import ToolResult, World


@dataclass(frozen=True, slots=True)
class Answered:
    """A call and what it was answered."""

    call: Call | BadCall
    result: ToolResult

    @property
    def arguments(self) -> str:
        """The arguments as JSON, or what the policy wrote where they could not be read."""
        if isinstance(self.call, BadCall):
            return self.call.written
        return msgspec.json.encode(self.call.arguments).decode()


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes calls for one turn of a session. `turn_key` names the turn to the world."""

    world: World
    task: Task
    tools: tuple[Tool, ...]
    turn_key: str
    limit: int

    async def answer(self, calls: Sequence[Call | BadCall], state: bytes) -> tuple[list[Answered], bytes]:
        """An answer to every call, in order, and the state after them. Raises: WorldError."""
        answered: list[Answered] = []
        while len(answered) < len(calls):
            at = len(answered)
            call = calls[at]
            if any(one.result.solved for one in answered):
                answered.append(_refused(call, "Error: not run, an earlier call of this turn ended the session"))
            elif at >= self.limit:
                answered.append(_refused(call, f"Error: not run, a turn may make {self.limit} calls"))
            elif isinstance(call, BadCall):
                answered.append(_refused(call, call.problem))
            elif reads := self._reads(calls[at : self.limit]):
                results = await asyncio.gather(*(self._call(one, at + n, state) for n, one in enumerate(reads)))
                answered += [Answered(one, result) for one, result in zip(reads, results, strict=True)]
            else:
                result = await self._call(call, at, state)
                state = state if result.state is None else result.state
                answered.append(Answered(call, result))
        return answered, state

    def _reads(self, calls: Sequence[Call | BadCall]) -> list[Call]:
        """The calls at the front that only read."""
        read_only = {tool.name for tool in self.tools if tool.read_only}
        reads: list[Call] = []
        for call in calls:
            if isinstance(call, BadCall) or call.tool not in read_only:
                break
            reads.append(call)
        return reads

    async def _call(self, call: Call, index: int, state: bytes) -> ToolResult:
        # The arguments are in the step's name: a turn that is sampled anew may call something else in its place.
        digest = blake3(msgspec.json.encode((call.tool, call.arguments), order="sorted")).hexdigest(length=8)
        return await self.world.call(
            task=self.task,
            tool=call.tool,
            arguments=call.arguments,
            state=state,
            step=f"{self.turn_key}/{index}-{digest}",
        )


def _refused(call: Call | BadCall, text: str) -> Answered:
    return Answered(call, ToolResult(text=text, ok=False))
