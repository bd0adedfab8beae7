"""Token-in/token-out generation: what rollouts and the gateway are made of."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rl_core.engines.engine import Engine
from rl_core.engines.http import error_detail, json_response, read_body, wait_or_abort
from rl_core.engines.protocol import (
    MSGPACK_TYPE,
    EndEvent,
    FaultEvent,
    GenerateBody,
    GenerateEvent,
    TokenEvent,
    parse_version,
)
from rl_core.engines.request import ActiveSequence
from rl_core.engines.request import Request as EngineRequest
from rl_core.engines.streams import EventStream, TokenFeed
from rl_core.errors import EngineError, RlCoreError

log = logging.getLogger(__name__)


class GenerateApi:
    """`POST /v1/generate`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> Response:
        """Answer with `Generated` as JSON, as MessagePack where the caller accepts it, or token by token."""
        body = await read_body(request, GenerateBody)
        wanted = EngineRequest(
            prompt=body.prompt_token_ids,
            sampling=body.sampling,
            min_version=parse_version(body.min_version),
            exact_version=parse_version(body.exact_version),
            routes=body.return_routes,
            tops=body.top_logprobs if body.stream else 0,
            background=body.background,
        )
        if body.stream:
            return self._stream(wanted, slot=body.slot)
        sequence = self._engine.submit(wanted, slot=body.slot)
        results = await wait_or_abort(request, [sequence.future], lambda: self._engine.abort(sequence, slot=body.slot))
        log.debug(
            "generated session=%s tokens=%d reason=%s",
            (body.session or "")[:64], len(results[0].token_ids), results[0].finish_reason,
        )  # fmt: skip
        if MSGPACK_TYPE in request.headers.get("accept", ""):
            return Response(msgspec.msgpack.encode(results[0]), media_type=MSGPACK_TYPE)
        return json_response(results[0])

    def _stream(self, wanted: EngineRequest, *, slot: str | None) -> Response:
        feed = TokenFeed()
        sequence = self._engine.submit(wanted, slot=slot, on_token=feed.listener(0))
        feed.watch(0, sequence)

        def closed() -> None:
            if not sequence.future.done():
                self._engine.abort(sequence, slot=slot)

        return EventStream(_events(sequence, feed), closed=closed, headers={})


async def _events(sequence: ActiveSequence, feed: TokenFeed) -> AsyncGenerator[GenerateEvent, None]:
    named, place = "", 0
    while (token := (await feed.get()).token) is not None:
        version = _version_of(sequence, place)
        place += 1
        yield TokenEvent(
            token=token.token,
            logprob=token.logprob,
            version="" if version == named else version,
            tops=list(token.tops),
        )
        named = version
    error = sequence.future.exception()
    if error is None:
        yield EndEvent(result=sequence.future.result())
        return
    fault = error if isinstance(error, RlCoreError) else EngineError(f"generation failed: {type(error).__name__}")
    yield FaultEvent(error=error_detail(fault))


def _version_of(sequence: ActiveSequence, place: int) -> str:
    """The version that sampled the token at `place`. The decode thread only appends spans and lengthens the last."""
    return next(span.version for span in reversed(sequence.spans) if span.start <= place)
