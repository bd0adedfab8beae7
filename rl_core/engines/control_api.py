"""The control listener: targets, versions, pauses, health and metrics. Only the control plane has its token."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rl_core.engines.gauges import prometheus_text
from rl_core.engines.http import json_response, read_body
from rl_core.engines.protocol import AnnounceBody, EngineStatus, PauseBody, SlotState, SlotStatus, TargetBody
from rl_core.engines.targets import TargetLoop
from rl_core.errors import RequestRefused
from rl_core.types import PauseMode

MAX_WAIT_S: Final = 60.0
_POLL_S: Final = 0.02
# Of these the largest of all slots is told, not the sum.
_LARGEST: Final = {"decode_step_median_s", "decode_step_max_s", "last_pause_s", "update_gap_s", "paused"}


class SteeredEngine(Protocol):
    """What the control listener asks of an engine. Calls may wait for it, and are made from threads."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the weight slots."""
        ...

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was made."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. Raises: EngineError."""
        ...

    def resume(self) -> None:
        """Go on. Raises: EngineError."""
        ...

    def snapshot(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers by slot; each slot has the same ones. Raises: EngineError."""
        ...


class ControlApi:
    """Handlers of the control listener."""

    def __init__(
        self,
        engine: SteeredEngine,
        reconcilers: Mapping[str, TargetLoop],
        *,
        name: str,
        announce: Callable[[AnnounceBody], None] | None = None,
    ) -> None:
        """`announce` takes what may be fetched ahead of a target; None where nothing is kept on disk."""
        self._engine = engine
        self._reconcilers = reconcilers
        self._name = name
        self._announce = announce

    async def target(self, request: Request) -> Response:
        """`POST /control/target`: 202 with the status; the work goes on in the background."""
        body = await read_body(request, TargetBody)
        self._reconciler(body.slot).set_target(body)
        return json_response(self._status(), 202)

    async def segments(self, request: Request) -> Response:
        """`POST /control/segments`: 202; what is fetched ahead is fetched in the background."""
        body = await read_body(request, AnnounceBody)
        if self._announce is None:
            raise RequestRefused("this engine fetches nothing ahead")
        await asyncio.to_thread(self._announce, body)
        return json_response({"version": body.version}, 202)

    async def version(self, request: Request) -> Response:
        """`GET /control/version?slot=&version=&wait_s=`: waits until it is served, failed, or time is up."""
        query = request.query_params
        wanted, slot = query.get("version"), query.get("slot")
        deadline = time.monotonic() + _seconds(query.get("wait_s"))
        reconciler = self._reconciler(slot)
        while time.monotonic() < deadline and not _settled(reconciler.status(), wanted):
            await asyncio.sleep(_POLL_S)
        return json_response(self._status())

    async def pause(self, request: Request) -> Response:
        """`POST /control/pause`: `wait` answers when what was running has finished."""
        body = await read_body(request, PauseBody)
        await asyncio.to_thread(self._engine.pause, body.mode)
        return json_response({"paused": body.mode})

    async def resume(self, _: Request) -> Response:
        """`POST /control/resume`."""
        await asyncio.to_thread(self._engine.resume)
        return json_response({"paused": None})

    async def health(self, _: Request) -> Response:
        """`GET /control/health`."""
        return json_response({"name": self._name, "status": "ok", "uptime_s": self._engine.uptime_s})

    async def metrics(self, _: Request) -> Response:
        """`GET /control/metrics`: sums over slots at the top, each slot's numbers under `slots`."""
        slots = await asyncio.to_thread(self._engine.snapshot)
        summed = {key: sum(numbers[key] for numbers in slots.values()) for key in next(iter(slots.values()))}
        for key in _LARGEST & summed.keys():
            summed[key] = max(numbers[key] for numbers in slots.values())
        return json_response({"name": self._name, "uptime_s": self._engine.uptime_s, **summed, "slots": slots})

    async def prometheus(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        slots = await asyncio.to_thread(self._engine.snapshot)
        return PlainTextResponse(prometheus_text(slots, uptime_s=self._engine.uptime_s))

    def _reconciler(self, slot: str | None) -> TargetLoop:
        if not self._reconcilers:
            raise RequestRefused("this engine was started without --store and takes no targets")
        name = slot or self._engine.slots[0]
        if name not in self._reconcilers:
            raise RequestRefused(f"there is no weight slot {name!r}; this engine has {', '.join(self._reconcilers)}")
        return self._reconcilers[name]

    def _status(self) -> EngineStatus:
        return EngineStatus(name=self._name, slots={n: r.status() for n, r in self._reconcilers.items()})


def _settled(status: SlotStatus, wanted: str | None) -> bool:
    if status.state is SlotState.RECONCILING:
        return False
    return wanted is None or status.version == wanted or (status.target == wanted and status.error is not None)


def _seconds(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError as error:
        raise RequestRefused(f"wait_s must be a number of seconds, not {text!r}") from error
    return min(max(value, 0.0), MAX_WAIT_S) if math.isfinite(value) else 0.0
