"""Which engine a turn goes to: one that holds a version it may use, preferably where its prefix is cached."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from controlplane.selectors.replica_tokens import Listener, replica_reach, replica_token
from controlplane.selectors.rollout_plans import Need, Place
from rl_core.engines.client import EngineClient
from rl_core.errors import EngineBusy, EngineUnreachable, VersionUnavailable
from rl_core.types import Generated, SamplingParams

_AVOID_UNREACHABLE_S = 2.0
_AVOID_VERSION_S = 0.25
_AVOID_BUSY_S = 0.5

Key = tuple[uuid.UUID, str]


@dataclass(slots=True)
class _Seat:
    place: Place
    in_flight: int = 0
    at_home: int = 0  # sessions of groups that are at home here, whether or not a turn is under way
    avoid_until: float = 0.0

    @property
    def load(self) -> float:
        return max(self.in_flight, self.at_home) / self.place.capacity


@dataclass(slots=True)
class Home:
    """Where a group's turns go by preference; `leave` when it is over."""

    replica_id: uuid.UUID | None
    _seat: _Seat | None
    _sessions: int

    def leave(self) -> None:
        """Make room. Safe to call twice."""
        if self._seat is not None:
            self._seat.at_home -= self._sessions
        self._seat = None


@dataclass(slots=True)
class ReplicaPool:
    """The places this process knows of, and what it has under way on each. For one event loop."""

    client_of: Callable[[Place], EngineClient] | None = None
    _seats: dict[Key, _Seat] = field(default_factory=dict)
    _clients: dict[tuple[uuid.UUID, str, int | None], EngineClient] = field(default_factory=dict)

    def update(self, places: list[Place]) -> None:
        """Take in what the database says now."""
        known = {(place.replica_id, place.slot): place for place in places}
        for key in [key for key in self._seats if key not in known]:
            del self._seats[key]
        for key, place in known.items():
            seat = self._seats.setdefault(key, _Seat(place))
            seat.place = place

    async def generate(
        self,
        need: Need,
        *,
        prefer: uuid.UUID | None,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        session: str,
    ) -> tuple[Generated, uuid.UUID]:
        """One turn, and the replica that played it. Raises: EngineBusy, VersionUnavailable, EngineUnreachable."""
        seat = self._choose(need, prefer)
        seat.in_flight += 1
        try:
            generated = await self._client(seat.place).generate(
                prompt_token_ids,
                sampling,
                min_version=need.min_version,
                exact_version=need.plan.exact_version,
                slot=seat.place.slot,
                return_routes=need.plan.with_routes,
                session=session,
                background=seat.place.background,
            )
        except EngineUnreachable:
            seat.avoid_until = time.monotonic() + _AVOID_UNREACHABLE_S
            raise
        except VersionUnavailable:
            seat.avoid_until = time.monotonic() + _AVOID_VERSION_S
            raise
        except EngineBusy:
            seat.avoid_until = time.monotonic() + _AVOID_BUSY_S
            raise
        finally:
            seat.in_flight -= 1
        return generated, seat.place.replica_id

    def settle(self, need: Need, sessions: int) -> Home:
        """Give a group a home, so that its attempts share one prompt and groups spread evenly; None where none fits."""
        with suppress(EngineBusy, VersionUnavailable):
            seat = self._choose(need, None)
            seat.at_home += sessions
            return Home(seat.place.replica_id, seat, sessions)
        return Home(None, None, 0)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))
        self._clients.clear()

    def _choose(self, need: Need, prefer: uuid.UUID | None) -> _Seat:
        fitting = [seat for seat in self._seats.values() if need.allows(seat.place)]
        if not fitting:
            wanted = need.plan.exact_version or need.min_version
            raise VersionUnavailable(f"no replica is known to hold {wanted} yet")
        now = time.monotonic()
        free = [seat for seat in fitting if seat.in_flight < seat.place.capacity and seat.avoid_until <= now]
        if not free:
            raise EngineBusy("every replica that holds a fitting version is full or was just found unwell")
        for seat in free:
            if seat.place.replica_id == prefer:
                return seat
        return min(free, key=_rank)

    def _client(self, place: Place) -> EngineClient:
        key = (place.replica_id, place.url, place.enrolment)
        if key not in self._clients:
            self._clients[key] = (self.client_of or inference_client)(place)
        return self._clients[key]


def _rank(seat: _Seat) -> tuple[float, int, int, float]:
    """The freest first; of equally free ones that with the newest version; of those, any."""
    version = seat.place.version
    epoch, number = (version.epoch, version.number) if version else (0, 0)
    return seat.load, -epoch, -number, random.random()


def inference_client(place: Place) -> EngineClient:
    """A client of the place's inference port. Raises: EngineUnreachable when its token file is not there."""
    try:
        token = replica_token(place.replica_id, Listener.INFERENCE, enrolment=place.enrolment)
    except OSError as error:
        raise EngineUnreachable(f"the inference token of {place.replica_id} does not read: {error}") from error
    return EngineClient(place.url, token, reach=replica_reach(place.enrolment))
