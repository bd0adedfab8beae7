"""Reading a request's body, and sending its answer: whole or as a stream, recorded before it is given."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from controlplane.gateway.errors import OpenAiError, json_response
from controlplane.gateway.requests import Asked
from controlplane.gateway.shapes import Shape
from controlplane.gateway.streams import AnswerStream, ClientLeft, watched
from controlplane.gateway.under_way import UnderWay
from controlplane.states import GenerationOutcome

MAX_BODY_BYTES: Final = 8 << 20
BODY_TIMEOUT_S: Final = 30.0

MakeShape = Callable[[uuid.UUID, str], Shape]


async def respond(request: Request, asked: Asked, answering: UnderWay, shape: MakeShape, *, logprobs: bool) -> Response:
    """Wait for the first tokens; then stream, or wait for the rest. However it ends, it is closed and recorded."""
    outcome: GenerationOutcome | None = GenerationOutcome.FAILED
    streaming = False
    try:
        await watched(request.receive, answering.begin())
        made = shape(answering.choices[0].generation_id, answering.version)
        if asked.stream:
            streaming = True
            return AnswerStream(answering, made, logprobs=logprobs, usage=asked.usage_in_stream)
        return json_response(await watched(request.receive, _whole(answering, made)))
    except ClientLeft:
        outcome = GenerationOutcome.CANCELLED
        return Response(status_code=499)
    except OpenAiError as error:
        # A request that was refused, or turned away before it began, is no generation.
        outcome = outcome if error.status >= 500 else None
        raise
    finally:
        if not streaming:
            await asyncio.shield(answering.close(outcome))


async def _whole(answering: UnderWay, shape: Shape) -> Any:
    """Raises: OpenAiError."""
    async with contextlib.aclosing(answering.events()) as events:
        async for _ in events:
            pass
    finished = []
    for choice in answering.choices:
        assert choice.result is not None
        finished.append(answering.finished(choice, choice.text.finish(choice.result.text)))
    await answering.record(GenerationOutcome.ANSWERED)
    return shape.whole(finished)


async def body_of(request: Request, *, max_bytes: int = 0) -> bytes:
    """The whole body. Raises: OpenAiError 413, 408."""
    limit_bytes = max_bytes or MAX_BODY_BYTES
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise OpenAiError(413, f"the body is over {limit_bytes} bytes", code="too_large")
    except TimeoutError as error:
        raise OpenAiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from error
    return bytes(body)
