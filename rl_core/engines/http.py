"""What both listeners share: bearer tokens, bounded bodies, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_core.engines.protocol import ErrorBody, ErrorDetail
from rl_core.errors import (
    EngineBusy,
    EngineError,
    ModelError,
    RequestRefused,
    RlCoreError,
    SpecError,
    StoreError,
    VersionUnavailable,
    WeightsError,
)

MAX_BODY_BYTES: Final = 8 << 20
RETRY_AFTER_S: Final = 1

# The first class that an error is an instance of decides.
_STATUS: Final[tuple[tuple[type[RlCoreError], int], ...]] = (
    (EngineBusy, 429),
    (VersionUnavailable, 409),
    (RequestRefused, 400),
    (SpecError, 400),
    (ModelError, 400),  # a chat template that refuses the messages
    (EngineError, 503),
    (StoreError, 503),
    (WeightsError, 503),
)
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}

_T = TypeVar("_T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value that msgspec can encode, as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(status: int, *, message: str, code: str | None, retryable: bool = False) -> Response:
    """An error in OpenAI's shape."""
    detail = ErrorDetail(message=message, type=_TYPES.get(status, "server_error"), code=code, retryable=retryable)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return json_response(ErrorBody(error=detail), status, headers)


def status_of(error: RlCoreError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_detail(error: RlCoreError) -> ErrorDetail:
    """An error of the library in OpenAI's shape, for streams that have begun."""
    kind = _TYPES.get(status_of(error), "server_error")
    return ErrorDetail(message=str(error), type=kind, code=error.code, retryable=error.retryable)


async def on_core_error(_: Request, error: Exception) -> Response:
    """Translate an error of the library."""
    assert isinstance(error, RlCoreError)
    return error_response(status_of(error), message=str(error), code=error.code, retryable=error.retryable)


async def on_http_error(_: Request, error: Exception) -> Response:
    """Translate Starlette's own errors: no such path, method or body."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, message=str(error.detail), code=None)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """The client left; nobody reads this."""
    return Response(status_code=499)


class BearerAuth:
    """Lets only calls through that carry the token, or that of the paths that begin so."""

    def __init__(self, app: ASGIApp, token: str, by_prefix: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._expected = f"bearer {token}".encode()
        self._by_prefix = {prefix: f"bearer {own}".encode() for prefix, own in (by_prefix or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the call on."""
        if scope["type"] == "http" and not self._carries_token(scope):
            refusal = error_response(401, message="send the engine's token as a bearer token", code="unauthorized")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _carries_token(self, scope: Scope) -> bool:
        own = (token for prefix, token in self._by_prefix.items() if scope["path"].startswith(prefix))
        expected = next(own, self._expected)
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                return hmac.compare_digest(scheme.lower() + b" " + token.strip(), expected)
        return False


async def read_body(request: Request, kind: type[_T]) -> _T:
    """The JSON body as a `kind`. Raises: RequestRefused, HTTPException 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not what this call takes: {error}") from error


async def wait_or_abort(request: Request, futures: list[Future[_T]], abort: Callable[[], None]) -> list[_T]:
    """Results of all futures; when the client leaves first, `abort`. Raises: what a future raises."""
    results: asyncio.Future[list[_T]] = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        waited: set[asyncio.Future[Any]] = {results, gone}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise ClientDisconnect
        return await results
    finally:
        gone.cancel()
        if not results.done() or results.cancelled() or results.exception() is not None:
            abort()
        results.cancel()


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
