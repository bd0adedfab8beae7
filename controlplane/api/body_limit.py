"""A bound on request bodies before anything reads them: Django spools a whole body to disk before a view sees it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from controlplane.api.problems import CONTENT_TYPE, problem

MAX_BODY_BYTES = 64 * 1024 * 1024

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class _TooLarge(Exception):
    """The body passed the limit while it was read."""


def body_limited(application: Application, *, limit: int = MAX_BODY_BYTES) -> Application:
    """Answer 413 to a body over `limit` bytes, announced or streamed; views have smaller limits of their own."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            await _refuse(send, limit)
            return
        read = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise _TooLarge
            return message

        try:
            await application(scope, counted, send)
        except _TooLarge:  # Django reads the whole body before it answers: nothing was sent yet
            await _refuse(send, limit)

    return limited


async def _refuse(send: Send, limit: int) -> None:
    detail = f"the body is over the limit of {limit} bytes"
    body = json.dumps(problem(status=413, code="too_large", detail=detail, request_id=uuid.uuid4().hex)).encode()
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
