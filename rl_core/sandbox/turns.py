"""Whose turn it is: a fixed number of runs at once, and clients that wait take turns, each served in its own order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from rl_core.errors import WorldError

_REMEMBERED = 1024  # clients whose last turn is known


class SandboxBusy(WorldError):
    """Too much is waiting already (HTTP 429)."""

    code = "sandbox_busy"
    retryable = True


class Turns:
    """Hands out turns. One asker behind a burst of another client's waits for one run of the burst, not for all."""

    def __init__(self, at_once: int, *, max_queued: int, max_queued_bytes: int) -> None:
        """`max_queued` bounds one client's runs that wait; four times that, and `max_queued_bytes`, bound all."""
        self.at_once, self.running, self.queued, self._turn = at_once, 0, 0, 0
        self._max_queued, self._max_bytes, self._bytes = max_queued, max_queued_bytes, 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}  # a count that grows, of each client's last turn; the oldest first

    @property
    def idle(self) -> bool:
        """Whether somebody who came now would not wait."""
        return self.running < self.at_once

    @contextlib.asynccontextmanager
    async def one(self, client: str, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn. Raises: SandboxBusy when too much waits already."""
        if self.idle:
            self.running += 1
            self._serve(client)
        else:
            await self._wait(client, size_bytes)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, client: str, size_bytes: int) -> None:
        mine = self._waiting.get(client, ())
        if len(mine) >= self._max_queued or self.queued >= 4 * self._max_queued:
            raise SandboxBusy(f"{len(mine)} runs of this client and {self.queued} of all wait already; try again later")
        if self._bytes + size_bytes > self._max_bytes:
            raise SandboxBusy(f"requests of {self._bytes} bytes wait already; try again later")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self.queued += 1
        self._bytes += size_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # it was given a turn that it does not take
            raise
        finally:
            self.queued -= 1
            self._bytes -= size_bytes

    def _next(self) -> None:
        """Give this turn to the client whose last turn is longest ago."""
        while self._waiting:
            client = min(self._waiting, key=lambda name: self._served.get(name, 0))
            turn = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not turn.done():
                self._serve(client)
                turn.set_result(None)
                return
        self.running -= 1

    def _serve(self, client: str) -> None:
        self._turn += 1
        self._served.pop(client, None)
        self._served[client] = self._turn
        if len(self._served) > _REMEMBERED:
            del self._served[next(iter(self._served))]
