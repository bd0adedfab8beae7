"""How Python steers an engine: synchronously, each call within a time and a size of its own. Imports no torch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from rl_core.destinations import Reach
from rl_core.engines.client import MALFORMED, raise_for, unreachable
from rl_core.engines.protocol import (
    AnnounceBody,
    EngineStatus,
    PauseBody,
    SlotState,
    SlotStatus,
    TargetBody,
)
from rl_core.engines.transport import EngineTransport, url_of
from rl_core.errors import EngineError
from rl_core.types import KvMode, PauseMode

CONTROL_S: Final = 30.0
ANNOUNCE_S: Final = 5.0
CONNECT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20
_LIMITS: Final = httpx.Limits(max_connections=2)
_T = TypeVar("_T")


class ControlClient:
    """Steers one engine. For the control plane alone: it needs the replica's control token.

    Requests run on an event loop of a thread of its own, because only there a deadline holds for a whole exchange,
    whatever the other side does with its bytes. For one thread at a time.
    """

    def __init__(
        self, control_url: str, token: str, *, reach: Reach | None = None, timeout_s: float = CONTROL_S
    ) -> None:
        """`reach` bounds where the URL may lead; None trusts it. Raises: EngineUnreachable for what is no URL."""
        self._http = httpx.AsyncClient(
            base_url=url_of(control_url),
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            timeout=CONTROL_S,
            transport=EngineTransport(reach=reach, limits=_LIMITS),
            trust_env=False,
        )
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-control", daemon=True)
        self._thread.start()

    def set_target(
        self,
        *,
        version: str,
        root: str,
        manifest: str,
        snapshot: str | None = None,
        deltas: Sequence[str] = (),
        peers: Sequence[str] = (),
        limit_bytes_s: float | None = None,
        repair: bool = False,
        slot: str | None = None,
        kv: KvMode = KvMode.KEEP,
    ) -> EngineStatus:
        """Tell the engine what a slot shall serve; it reconciles in the background.

        The fields are those of `TargetBody`. Raises: EngineError.
        """
        body = TargetBody(
            version=version, root=root, manifest=manifest, snapshot=snapshot, deltas=list(deltas), peers=list(peers),
            limit_bytes_s=limit_bytes_s, repair=repair, slot=slot, kv=kv,
        )  # fmt: skip
        return self._status(self._call("POST", "/control/target", content=msgspec.json.encode(body)))

    def announce(self, body: AnnounceBody) -> None:
        """Tell the engine what it may fetch ahead of a target, without patience. Raises: EngineError."""
        self._call("POST", "/control/segments", content=msgspec.json.encode(body), timeout_s=ANNOUNCE_S)

    def status(self) -> EngineStatus:
        """What every slot serves. Raises: EngineError."""
        return self._status(self._call("GET", "/control/version"))

    def wait_version(self, version: str, *, slot: str | None = None, timeout_s: float = 60.0) -> SlotStatus:
        """Wait until the slot serves `version`; its status. Other states come back too: look at `version` and `error`.

        Returns early when the slot gave the target up. Raises: EngineError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            query = {"version": version, "wait_s": f"{max(min(left, 20.0), 0.0):.3f}"} | (
                {"slot": slot} if slot else {}
            )
            status = self._status(self._call("GET", "/control/version", params=query))
            one = status.slots[slot] if slot else next(iter(status.slots.values()))
            gave_up = one.state is not SlotState.RECONCILING and one.target == version and one.error is not None
            if one.version == version or gave_up or left <= 0:
                return one

    def pause(self, mode: PauseMode, *, timeout_s: float = 300.0) -> None:
        """Stop generating. Raises: EngineError."""
        self._call("POST", "/control/pause", content=msgspec.json.encode(PauseBody(mode=mode)), timeout_s=timeout_s)

    def resume(self) -> None:
        """Go on. Raises: EngineError."""
        self._call("POST", "/control/resume")

    def health(self) -> dict[str, Any]:
        """`name`, `status`, `uptime_s`. Raises: EngineError."""
        return _decoded(self._call("GET", "/control/health"), dict[str, Any])

    def metrics(self) -> dict[str, Any]:
        """Numbers of the engine, summed over its slots, and by slot under `slots`. Raises: EngineError."""
        return _decoded(self._call("GET", "/control/metrics"), dict[str, Any])

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None = None,
        params: dict[str, str] | None = None,
        content: bytes | None = None,
    ) -> bytes:
        """The body of an answer. Raises: EngineError."""
        within_s = timeout_s or self._timeout_s
        timeout = httpx.Timeout(within_s, connect=min(CONNECT_S, within_s))
        request = self._http.build_request(method, path, params=params, content=content, timeout=timeout)
        exchange = self._exchange(request, within_s)
        return asyncio.run_coroutine_threadsafe(exchange, self._loop).result()

    async def _exchange(self, request: httpx.Request, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    body = await _body_of(response)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            raise unreachable(error, self._http.base_url) from error
        raise_for(httpx.Response(response.status_code, content=body))
        return body

    def _status(self, body: bytes) -> EngineStatus:
        return _decoded(body, EngineStatus)


async def _body_of(response: httpx.Response) -> bytes:
    """The body as it came, without NUL, which PostgreSQL takes in no text. Raises: EngineError past its bound."""
    received = bytearray()
    async for piece in response.aiter_raw():
        received += piece
        if len(received) > MAX_ANSWER_BYTES:
            raise EngineError(f"the engine's answer is over {MAX_ANSWER_BYTES} bytes")
    return bytes(received).replace(rb"\u0000", rb"\ufffd")


def _decoded(body: bytes, kind: type[_T]) -> _T:
    """Raises: EngineError for an answer of another shape."""
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        raise EngineError(f"the engine's answer does not read: {error}; is it of another release?") from error
