"""How Python generates on an engine, asynchronously. Imports no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Final, Self

import httpx
import msgspec

from rl_core.destinations import Reach
from rl_core.engines.protocol import (
    EVENTS_TYPE,
    MSGPACK_TYPE,
    EndEvent,
    ErrorBody,
    FaultEvent,
    GenerateBody,
    GenerateEvent,
    TokenEvent,
)
from rl_core.engines.transport import EngineTransport, url_of
from rl_core.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, VersionUnavailable
from rl_core.types import Generated, SamplingParams, VersionRef

# A generation may queue behind others; the engine ends every one of them itself.
GENERATE_TIMEOUT: Final = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=600.0)

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
# What decoding an answer meets when a listener talks nonsense, on purpose or not.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_MESSAGE: Final = 2000


class EngineClient:
    """Generates on one engine. One instance may serve many tasks of one event loop."""

    def __init__(self, base_url: str, token: str, *, reach: Reach | None = None, max_connections: int = 256) -> None:
        """`reach` bounds where the URL may lead; None trusts it. Raises: EngineUnreachable for what is no URL."""
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(
            base_url=url_of(base_url),
            headers={"Authorization": f"Bearer {token}", "Accept": MSGPACK_TYPE, "Content-Type": "application/json"},
            timeout=GENERATE_TIMEOUT,
            transport=EngineTransport(reach=reach, limits=limits),
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
        background: bool = False,
    ) -> Generated:
        """Generate a completion. Cancelling the task aborts it in the engine. The fields are those of `GenerateBody`.

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
            background=background,
        )
        try:
            response = await self._http.post("/v1/generate", content=msgspec.json.encode(body))
        except httpx.HTTPError as error:
            raise unreachable(error, self._http.base_url) from error
        raise_for(response)
        try:
            return msgspec.msgpack.decode(response.content, type=Generated)
        except MALFORMED as error:
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
                    raise_for(response)
                async for event in _events_of(response):
                    yield event
        except httpx.HTTPError as error:
            raise unreachable(error, self._http.base_url) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


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
            except MALFORMED as error:
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


def unreachable(error: Exception, url: httpx.URL) -> EngineUnreachable:
    """What it means that a request had no whole answer."""
    return EngineUnreachable(f"no answer from the engine at {url}: {type(error).__name__}: {error}")


def raise_for(response: httpx.Response) -> None:
    """Raise what an answer with an error means. Raises: EngineError."""
    if response.is_success:
        return
    try:
        message = msgspec.json.decode(response.content, type=ErrorBody).error.message
    except MALFORMED:
        message = f"HTTP {response.status_code}"
    raise _ERRORS.get(response.status_code, EngineError)(message[:_MAX_MESSAGE])
