"""OpenAI's endpoints, passed through to vLLM: what it takes and answers, with the version that answered in a header.

`min_version`, `exact_version` and `slot` are ours and are taken out; tools, structured output and the rest of what
vLLM knows beyond the embedded engine pass.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from typing import Any, Final

import httpx
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rl_core.engines.http import error_detail, error_response, json_response, read_body
from rl_core.engines.protocol import ErrorBody, parse_version
from rl_core.engines.streams import LAST_EVENT, ByteStream, encode_event
from rl_core.engines.vllm.replica import VllmReplica
from rl_core.engines.vllm.tickets import Ticket
from rl_core.engines.vllm.upstream import VllmInference, unreachable
from rl_core.errors import EngineError, RequestRefused

_OURS: Final = ("min_version", "exact_version", "slot")
VERSION_HEADER: Final = "X-Slipway-Version"


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


class VllmOpenAiApi:
    """Handlers. `name` is the model's name."""

    def __init__(self, replica: VllmReplica, inference: VllmInference, *, name: str, born: int) -> None:
        self._replica = replica
        self._inference = inference
        self._name = name
        self._born = born

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        entry = {"id": self._name, "object": "model", "created": self._born, "owned_by": "slipway"}
        return json_response({"object": "list", "data": [entry]})

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._pass(request, "/v1/chat/completions")

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._pass(request, "/v1/completions")

    async def _pass(self, request: Request, path: str) -> Response:
        body = await read_body(request, dict[str, Any])
        ours = {name: body.pop(name, None) for name in _OURS}
        self._check(body, ours)
        admitted = self._replica.tickets.admitted(
            min_version=parse_version(ours["min_version"]),
            exact_version=parse_version(ours["exact_version"]),
            labelled=True,
        )
        with ExitStack() as leaving:
            ticket = leaving.enter_context(admitted)
            upstream = self._inference.http.build_request(
                "POST", path, json={**body, "model": self._name}, headers={"X-Request-Id": ticket.request_id}
            )
            try:
                answer = await ticket.run(self._inference.http.send(upstream, stream=True))
                if body.get("stream") and answer.is_success:
                    return self._stream(answer, ticket, leaving.pop_all())
                content = await ticket.run(answer.aread())
            except httpx.HTTPError as error:
                self._replica.lost(gone := unreachable(error))
                raise gone from error
            return _answer(answer.status_code, content, ticket)

    def _check(self, body: dict[str, Any], ours: dict[str, Any]) -> None:
        if any(not isinstance(value, str | None) for value in ours.values()):
            raise RequestRefused(f"{', '.join(_OURS)} are texts")
        model = body.get("model") or self._name
        name, _, slot = str(model).partition(":")
        if name != self._name or (ours["slot"] or slot or self._replica.slots[0]) not in self._replica.slots:
            raise HTTPException(404, f"there is no model {model!r} here; this engine serves {self._name}")

    def _stream(self, answer: httpx.Response, ticket: Ticket, leaving: ExitStack) -> Response:
        headers = {VERSION_HEADER: ticket.version_of(0)}
        return ByteStream(self._chunks(answer, ticket), closed=leaving.close, headers=headers)

    async def _chunks(self, answer: httpx.Response, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """What vLLM sends, until the request is evicted; the last event says so."""
        chunks = answer.aiter_raw()
        try:
            while (chunk := await ticket.run(_next_of(chunks))) is not None:
                yield chunk
        except (EngineError, httpx.HTTPError) as error:
            if isinstance(error, httpx.HTTPError):
                self._replica.lost(error := unreachable(error))
            yield encode_event(ErrorBody(error=error_detail(error))) + LAST_EVENT
        finally:
            await answer.aclose()


async def _next_of(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def _answer(status: int, content: bytes, ticket: Ticket) -> Response:
    """VLLM's answer; an error in the shape that the engines' own have."""
    if status >= 400:
        try:
            error = msgspec.json.decode(content, type=dict[str, dict[str, Any]])["error"]
        except (msgspec.DecodeError, KeyError):
            error = {}
        code = "request_refused" if status < 500 else "engine_error"
        return error_response(status, message=str(error.get("message", f"HTTP {status}")), code=code)
    return Response(content, 200, {VERSION_HEADER: ",".join(_versions(content, ticket))}, "application/json")


def _versions(content: bytes, ticket: Ticket) -> dict[str, None]:
    """The versions that sampled an answer, in order; of several choices, those that may have. Raises: EngineError."""
    try:
        usage = msgspec.json.decode(content, type=_Whole).usage
    except msgspec.DecodeError as error:
        raise EngineError(f"vLLM's answer does not read: {error}") from error
    tokens = usage.completion_tokens if usage else 0
    # A swap that came after the last token labelled what was never sampled.
    return dict.fromkeys(version for start, version in ticket.labels if start < max(tokens, 1))
