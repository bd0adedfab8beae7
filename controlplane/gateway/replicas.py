"""The replicas as this process knows them: pooled connections, what is under way on each, and who failed lately."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec
import structlog

from controlplane.gateway.errors import OpenAiError, RouteStale
from controlplane.selectors.lane_routes import Seat
from rl_core.engines.client import EngineClient
from rl_core.engines.protocol import EndEvent, GenerateBody, TokenEvent
from rl_core.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, VersionUnavailable
from rl_core.types import FinishReason

AVOID_FAILED_S: Final = 2.0
AVOID_BUSY_S: Final = 0.25
MAX_CONNECTIONS: Final = 1024

log = structlog.get_logger(__name__)
Event = TokenEvent | EndEvent


class Flight:
    """One generation under way on one replica, after its first event. Close it."""

    def __init__(self, replicas: Replicas, seat: Seat, events: AsyncGenerator[Event, None]) -> None:
        self.seat = seat
        self._replicas = replicas
        self._events = events
        self._first: Event | None = None
        self._open = True
        replicas.under_way[seat.replica_id] += 1

    async def begin(self) -> None:
        """Wait for the first event. Raises: EngineError."""
        self._first = _whole(await anext(self._events))

    @property
    def first_version(self) -> str:
        """The version of the first token; empty before it."""
        if isinstance(self._first, EndEvent):
            return self._first.result.spans[0].version if self._first.result.spans else ""
        return self._first.version if self._first else ""

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event, the first one too. Raises: EngineError."""
        if self._first is not None:
            yield self._first
        async for event in self._events:
            yield _whole(event)

    async def aclose(self) -> None:
        """Leave: what is not finished is aborted in the engine. Safe to call twice."""
        if self._open:
            self._open = False
            self._replicas.under_way[self.seat.replica_id] -= 1
            await self._events.aclose()


class Replicas:
    """Every replica that this process has asked. For one event loop."""

    def __init__(self) -> None:
        self.under_way: Counter[uuid.UUID] = Counter()
        self._avoid_until: dict[uuid.UUID, float] = {}
        self._clients: dict[tuple[str, str], EngineClient] = {}

    def order(self, seats: Sequence[Seat], *, affinity: str) -> list[Seat]:
        """In which order to try: those that failed lately last, the least busy first.

        Among equals the same caller meets the same replica, where its prompt's beginning may be cached.
        """
        now = time.monotonic()

        def place(seat: Seat) -> tuple[bool, int, bytes]:
            digest = hashlib.blake2b(seat.replica_id.bytes + affinity.encode(), digest_size=8).digest()
            return self._avoid_until.get(seat.replica_id, 0.0) > now, self.under_way[seat.replica_id], digest

        return sorted(seats, key=place)

    async def begin(
        self, seats: Sequence[Seat], body: GenerateBody, *, affinity: str, first_token_s: float, deadline: float
    ) -> Flight:
        """Begin on the first replica that gives a token in time; the others are tried in turn.

        `deadline` is of the event loop's clock. Raises: OpenAiError, RouteStale.
        """
        failures: list[EngineError | TimeoutError] = []
        clock = asyncio.get_running_loop().time
        for seat in self.order(seats, affinity=affinity):
            if clock() >= deadline:
                break
            try:
                client = self._client(seat)
            except EngineError as error:
                self._note(seat, error)
                failures.append(error)
                continue
            flight = Flight(
                self, seat, client.stream(msgspec.structs.replace(body, slot=seat.slot, background=seat.background))
            )
            try:
                async with asyncio.timeout_at(min(clock() + first_token_s, deadline)):
                    await flight.begin()
            except RequestRefused as error:
                await flight.aclose()
                raise OpenAiError(400, str(error), code="invalid_value") from error
            except (EngineError, TimeoutError) as error:
                await flight.aclose()
                self._note(seat, error)
                failures.append(error)
            except BaseException:
                await flight.aclose()
                raise
            else:
                return flight
        raise _verdict(failures)

    async def aclose(self) -> None:
        """Close every connection."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def _client(self, seat: Seat) -> EngineClient:
        key = (seat.url, seat.token)
        if key not in self._clients:
            self._clients[key] = EngineClient(seat.url, seat.token, reach=seat.reach, max_connections=MAX_CONNECTIONS)
        return self._clients[key]

    def _note(self, seat: Seat, error: Exception) -> None:
        if isinstance(error, VersionUnavailable):
            return
        pause_s = AVOID_BUSY_S if isinstance(error, EngineBusy) else AVOID_FAILED_S
        self._avoid_until[seat.replica_id] = time.monotonic() + pause_s
        log.warning("replica_failed", replica=str(seat.replica_id), error=f"{type(error).__name__}: {error}")


def _whole(event: Event) -> Event:
    """Nobody here aborts and then listens: an aborted result means that the engine is being stopped or paused."""
    if isinstance(event, EndEvent) and event.result.finish_reason is FinishReason.ABORT:
        raise EngineUnreachable("the engine ended the generation before it was finished")
    return event


def _verdict(failures: Sequence[EngineError | TimeoutError]) -> OpenAiError | RouteStale:
    """What no replica's answer means for the client."""
    if failures and all(isinstance(error, VersionUnavailable) for error in failures):
        return RouteStale()
    if failures and all(isinstance(error, EngineBusy | VersionUnavailable) for error in failures):
        return OpenAiError(429, "every replica's queue is full; try again", code="rate_limit_exceeded", retry_after_s=1)
    if any(isinstance(error, TimeoutError) for error in failures):
        return OpenAiError(504, "no replica gave a token in time; try again", code="timeout", retry_after_s=1)
    return OpenAiError(503, "no replica answered; try again", code="no_replica", retry_after_s=2)
