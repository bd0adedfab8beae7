"""A world that somebody else runs, for our harness. Its state here is a handle and the number of the next step."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.environments.remote.client import RemoteClient
from rl_core.environments.remote.messages import Called, Closed, Exported, Opened
from rl_core.environments.remote.protocol import Ask
from rl_core.environments.tasks import Task
from rl_core.environments.world import ToolResult
from rl_core.errors import RemoteEnded, TrajectoryError


class RemoteState(msgspec.Struct, frozen=True):
    """What a session carries of a remote world. Steps are numbered from 0."""

    handle: str
    next: int


class RemoteWorld:
    """The `World` contract over the protocol. The server remembers its last answers, so a step made again acts once.

    A copy of a session is not a copy of the remote's state: the second of two different next steps is refused there.
    Raises, in every method: see RemoteClient.ask.
    """

    def __init__(self, client: RemoteClient) -> None:
        self._client = client

    async def open(self, *, task: Task, key: str) -> bytes:
        """See World. The task goes without its reference: graders are ours."""
        told = {"id": task.id, "split": task.split.value, "input": task.input}
        opened = await self._client.ask(Ask.WORLD_OPEN, Opened, key=key, task=told)
        return msgspec.json.encode(RemoteState(opened.handle, opened.next))

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """See World."""
        at = _read(state)
        called = await self._client.ask(
            Ask.WORLD_CALL, Called, handle=at.handle, number=at.next, step=step, tool=tool, arguments=arguments
        )
        return ToolResult(
            text=called.text,
            ok=called.ok,
            solved=called.solved,
            artifacts=called.artifacts,
            state=msgspec.json.encode(RemoteState(at.handle, at.next + 1)),
        )

    async def export(self, *, task: Task, state: bytes) -> dict[str, str]:
        """See World."""
        exported = await self._client.ask(Ask.WORLD_EXPORT, Exported, handle=_read(state).handle)
        return exported.artifacts

    async def close(self, *, task: Task, state: bytes) -> None:
        """See World. One that its server let go of already is closed."""
        try:
            await self._client.ask(Ask.WORLD_CLOSE, Closed, handle=_read(state).handle)
        except RemoteEnded:
            return


def _read(state: bytes) -> RemoteState:
    try:
        return msgspec.json.decode(state, type=RemoteState)
    except msgspec.DecodeError as error:
        raise TrajectoryError(f"not the state of a remote world: {error}") from error
