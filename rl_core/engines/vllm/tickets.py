"""Requests in flight: who may be answered by which version, and which version sampled which token.

A request is admitted against the version that serves and those that are about to. Before a swap, what the next version
may not answer gets a while to finish, and is failed then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rl_core.engines.vllm.messages import ROUTES_PREFIX, new_ticket
from rl_core.errors import EngineBusy, EngineError, VersionUnavailable
from rl_core.types import VersionRef

_DRAINED_AGAIN_S: Final = 0.02
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight. `labels` are the places from which on a version sampled its tokens.

    `labelled`: somebody reads them before vLLM has told the spans itself. `routes`: its routed experts are wanted.
    """

    identity: str
    routes: bool
    min_version: VersionRef | None
    exact_version: VersionRef | None
    labels: list[tuple[int, str]]
    labelled: bool = False
    error: EngineError | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _task: asyncio.Task[Any] | None = None

    def accepts(self, version: VersionRef | None) -> bool:
        """Whether tokens of `version` may answer this request."""
        if version is None:
            return self.min_version is None and self.exact_version is None
        return version.satisfies(min_version=self.min_version, exact_version=self.exact_version)

    @property
    def request_id(self) -> str:
        """What vLLM is told."""
        return f"{ROUTES_PREFIX}{self.identity}" if self.routes else self.identity

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`; when the request is evicted meanwhile, that is cancelled. Raises: what evicted it."""
        task = asyncio.ensure_future(work)
        self._task = task
        try:
            if self.error is not None:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
            task.cancel()
            raise
        finally:
            self._task = None

    def evict(self, error: EngineError) -> None:
        """Fail the request. From any thread."""
        self.error = error
        self._loop.call_soon_threadsafe(self._cancel)

    def label(self, start: int, version: str) -> None:
        """Tokens from `start` on are of `version`."""
        self.labels = [(place, named) for place, named in self.labels if place < start] + [(start, version)]

    def version_of(self, place: int) -> str:
        """The version that sampled token number `place`."""
        return next(version for start, version in reversed(self.labels) if start <= place)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Tickets:
    """All requests in flight on one vLLM. Thread-safe."""

    def __init__(self, *, capacity: int) -> None:
        self.version: VersionRef | None = None
        self.closed: EngineError | None = EngineError("the engine is starting; try again in a moment")
        self.left = 0  # requests that left since the workers were last told who is in flight
        self._capacity = capacity
        self._tickets: dict[str, Ticket] = {}
        self._successors: list[VersionRef | None] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def labelled(self) -> list[str]:
        """The requests in flight whose labels are read, to tell the workers."""
        with self._lock:
            self.left = 0
            return [ticket.identity for ticket in self._tickets.values() if ticket.labelled]

    @contextmanager
    def admitted(
        self, *, min_version: VersionRef | None = None, exact_version: VersionRef | None = None, routes: bool = False,
        labelled: bool = False,
    ) -> Iterator[Ticket]:  # fmt: skip
        """A ticket for as long as the request is in flight. Raises: EngineBusy, VersionUnavailable, EngineError."""
        identity = new_ticket()
        with self._lock:
            if self.closed is not None:
                raise self.closed
            labels = [(0, str(self.version or ""))]
            ticket = Ticket(identity, routes, min_version, exact_version, labels, labelled)
            if not all(ticket.accepts(version) for version in (self.version, *self._successors)):
                raise VersionUnavailable(self._unavailable(ticket))
            if len(self._tickets) >= self._capacity:
                raise EngineBusy(f"{len(self._tickets)} requests are in flight; try again in a moment")
            self._tickets[identity] = ticket
        try:
            yield ticket
        finally:
            with self._lock:
                del self._tickets[identity]
                self.left += 1

    @contextmanager
    def succession(self, version: VersionRef, *, drain_s: float) -> Iterator[None]:
        """While a swap to `version` is made: nothing that it may not answer is taken, and what is left of it fails."""
        with self._lock:
            self._successors.append(version)
        try:
            deadline = time.monotonic() + drain_s
            while self._outdated(version) and time.monotonic() < deadline:
                time.sleep(_DRAINED_AGAIN_S)
            for ticket in self._outdated(version):
                ticket.evict(VersionUnavailable(self._unavailable(ticket)))
            yield
        finally:
            with self._lock:
                self._successors.remove(version)

    def swapped(self, version: VersionRef | None, counts: Mapping[str, int]) -> None:
        """From now on `version` samples; `counts` are the tokens before, of tickets that had any.

        What it may not answer fails.
        """
        with self._lock:
            self.version = version
            for ticket in self._tickets.values():
                if ticket.accepts(version):
                    ticket.label(counts.get(ticket.identity, 0), str(version or ""))
                else:
                    ticket.evict(VersionUnavailable(self._unavailable(ticket)))

    def evict_all(self, error: EngineError) -> None:
        """Fail everything in flight."""
        with self._lock:
            for ticket in self._tickets.values():
                ticket.evict(error)

    def _outdated(self, version: VersionRef) -> list[Ticket]:
        with self._lock:
            return [ticket for ticket in self._tickets.values() if not ticket.accepts(version)]

    def _unavailable(self, ticket: Ticket) -> str:
        serves = " and then ".join(str(version or "no version yet") for version in (self.version, *self._successors))
        return f"version {ticket.exact_version or ticket.min_version} is wanted; this engine serves {serves}"
