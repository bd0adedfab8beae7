"""Token-in/token-out generation: what rollouts are made of."""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rl_core.engines.engine import Engine
from rl_core.engines.http import json_response, read_body, wait_or_abort
from rl_core.engines.protocol import MSGPACK_TYPE, GenerateBody, parse_version
from rl_core.engines.request import Request as EngineRequest

log = logging.getLogger(__name__)


class GenerateApi:
    """`POST /v1/generate`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> Response:
        """Answer with `Generated` as JSON, or as MessagePack where the caller accepts it."""
        body = await read_body(request, GenerateBody)
        wanted = EngineRequest(
            prompt=body.prompt_token_ids,
            sampling=body.sampling,
            min_version=parse_version(body.min_version),
            exact_version=parse_version(body.exact_version),
            routes=body.return_routes,
        )
        sequence = self._engine.submit(wanted, slot=body.slot)
        results = await wait_or_abort(request, [sequence.future], lambda: self._engine.abort(sequence, slot=body.slot))
        log.debug(
            "generated session=%s tokens=%d reason=%s",
            (body.session or "")[:64], len(results[0].token_ids), results[0].finish_reason,
        )  # fmt: skip
        if MSGPACK_TYPE in request.headers.get("accept", ""):
            return Response(msgspec.msgpack.encode(results[0]), media_type=MSGPACK_TYPE)
        return json_response(results[0])
