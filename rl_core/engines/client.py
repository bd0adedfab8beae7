"""How Python talks to an engine: generation asynchronously, control synchronously. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from rl_core.engines.protocol import (
    EVENTS_TYPE,
    MSGPACK_TYPE,
    EndEvent,
    EngineStatus,
    ErrorBody,
    FaultEvent,
    GenerateBody,
    GenerateEvent,
    PauseBody,
    SlotState,
    SlotStatus,
    TargetBody,
    TokenEvent,
)
from rl_core.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, VersionUnavailable
from rl_core.types import Generated, KvMode, PauseMode, SamplingParams, VersionRef

# A generation may queue behind others; the engine ends every one of them itself.
GENERATE_TIMEOUT: Final = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=600.0)
CONTROL_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)

_ERRORS: Final[dict[int, type[EngineError]]] = {
    400: RequestRefused,
    401: RequestRefused,
    404: RequestRefused,
    409: VersionUnavailable,
    413: RequestRefused,
    429: EngineBusy,
    503: EngineUnreachable,
}
_BY_CODE: Final[dict[str | None, type[EngineError]]] = {kind.code: kind for kind in _ERRORS.values()}
_EVENTS: Final = msgspec.json.Decoder(GenerateEvent)
_DONE: Final = b"[DONE]"
_T = TypeVar("_T")


class EngineClient:
    """Generates on one engine. One instance may serve many tasks of one event loop."""

    def __init__(self, base_url: str, token: str, *, max_connections: int = 256) -> None:
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}", "Accept": MSGPACK_TYPE, "Content-Type": "application/json"},
            timeout=GENERATE_TIMEOUT,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            trust_env=False,
        )

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        min_version: VersionRef | None = None,
        exact_version: VersionRef | None = None,
        slot: str | None = None,
        return_routes: bool = False,
        session: str | None = None,
    ) -> Generated:
        """Generate a completion. Cancelling the task aborts it in the engine.

        Raises: EngineBusy, VersionUnavailable, EngineUnreachable (all retryable), RequestRefused.
        """
        body = GenerateBody(
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            min_version=None if min_version is None else str(min_version),
            exact_version=None if exact_version is None else str(exact_version),
            slot=slot,
            return_routes=return_routes,
            session=session,
        )
        try:
            response = await self._http.post("/v1/generate", content=msgspec.json.encode(body))
        except httpx.HTTPError as error:
            raise _unreachable(error, self._http.base_url) from error
        _raise_for(response)
        try:
            return msgspec.msgpack.decode(response.content, type=Generated)
        except msgspec.DecodeError as error:
            raise EngineError(f"the engine's answer does not read: {error}; is it of another release?") from error

    async def stream(self, body: GenerateBody) -> AsyncGenerator[TokenEvent | EndEvent, None]:
        """Generate token by token; the last event is the result. Closing the iterator aborts it in the engine.

        Raises: as `generate`; EngineUnreachable too when the stream breaks off, EngineError when generation failed.
        """
        content = msgspec.json.encode(msgspec.structs.replace(body, stream=True))
        try:
            async with self._http.stream(
                "POST", "/v1/generate", content=content, headers={"Accept": EVENTS_TYPE}
            ) as response:
                if not response.is_success:
                    await response.aread()
                    _raise_for(response)
                async for event in _events_of(response):
                    yield event
        except httpx.HTTPError as error:
            raise _unreachable(error, self._http.base_url) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class ControlClient:
    """Steers one engine. For the control plane alone: it needs the replica's control token."""

    def __init__(self, control_url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=control_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=CONTROL_TIMEOUT,
            trust_env=False,
        )

    def set_target(
        self,
        *,
        version: str,
        root: str,
        manifest: str,
        snapshot: str | None = None,
        slot: str | None = None,
        kv: KvMode = KvMode.KEEP,
    ) -> EngineStatus:
        """Tell the engine what a slot shall serve; it reconciles in the background.

        Raises: EngineUnreachable, RequestRefused.
        """
        body = TargetBody(version=version, root=root, manifest=manifest, snapshot=snapshot, slot=slot, kv=kv)
        return self._status(self._call("POST", "/control/target", content=msgspec.json.encode(body)))

    def status(self) -> EngineStatus:
        """What every slot serves. Raises: EngineUnreachable."""
        return self._status(self._call("GET", "/control/version"))

    def wait_version(self, version: str, *, slot: str | None = None, timeout_s: float = 60.0) -> SlotStatus:
        """Wait until the slot serves `version`; its status. Other states come back too: look at `version` and `error`.

        Returns early when the slot gave the target up. Raises: EngineUnreachable, RequestRefused.
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
        """Stop generating. Raises: EngineUnreachable."""
        self._call("POST", "/control/pause", content=msgspec.json.encode(PauseBody(mode=mode)), timeout=timeout_s)

    def resume(self) -> None:
        """Go on. Raises: EngineUnreachable."""
        self._call("POST", "/control/resume")

    def health(self) -> dict[str, Any]:
        """`name`, `status`, `uptime_s`. Raises: EngineUnreachable."""
        return _object_of(self._call("GET", "/control/health"))

    def metrics(self) -> dict[str, Any]:
        """Numbers of the engine, summed over its slots, and by slot under `slots`. Raises: EngineUnreachable."""
        return _object_of(self._call("GET", "/control/metrics"))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise _unreachable(error, self._http.base_url) from error
        _raise_for(response)
        return response

    def _status(self, response: httpx.Response) -> EngineStatus:
        return _decoded(response, EngineStatus)


def _object_of(response: httpx.Response) -> dict[str, Any]:
    return _decoded(response, dict[str, Any])


def _decoded(response: httpx.Response, kind: type[_T]) -> _T:
    """Raises: EngineError for an answer of another shape."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"the engine's answer does not read: {error}; is it of another release?") from error


async def _events_of(response: httpx.Response) -> AsyncGenerator[TokenEvent | EndEvent, None]:
    """The events of a stream. The end is given once the body has been read, so that its connection is kept."""
    pending, end = b"", None
    async for chunk in response.aiter_raw():
        *lines, pending = (pending + chunk).split(b"\n\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == _DONE:
                continue
            try:
                event = _EVENTS.decode(data)
            except msgspec.DecodeError as error:
                raise EngineError(f"the engine's event does not read: {error}; is it of another release?") from error
            if isinstance(event, FaultEvent):
                raise _BY_CODE.get(event.error.code, EngineError)(event.error.message)
            if isinstance(event, EndEvent):
                end = event
            else:
                yield event
    if end is None:
        raise EngineUnreachable("the engine's stream ended without a result; it was stopped")
    yield end


def _unreachable(error: httpx.HTTPError, url: httpx.URL) -> EngineUnreachable:
    return EngineUnreachable(f"no answer from the engine at {url}: {type(error).__name__}: {error}")


def _raise_for(response: httpx.Response) -> None:
    """Raise what an answer with an error means."""
    if response.is_success:
        return
    try:
        message = msgspec.json.decode(response.content, type=ErrorBody).error.message
    except msgspec.DecodeError:
        message = f"HTTP {response.status_code}"
    raise _ERRORS.get(response.status_code, EngineError)(message)
