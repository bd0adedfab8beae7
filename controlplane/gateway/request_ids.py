"""The request's id, bound to the logs and sent back, as every other answer of the web process has one."""

from __future__ import annotations

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.middleware import REQUEST_ID_HEADER, request_id_from


class RequestIds:
    """Takes a well-formed `X-Request-ID` or makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, pass it on."""
        request_id = request_id_from(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._app(scope, receive, named)
