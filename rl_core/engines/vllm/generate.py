"""`POST /v1/generate` over vLLM's token-in/token-out endpoint: bodies, answers and errors as the embedded engine's.

Logprobs are of the distribution that was sampled from (vLLM's `processed_logprobs`). A turn ends by the model's end
tokens alone, as the tokenizer's folder names them, and by stop strings; the tokens that ended it are part of it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rl_core.chat import ChatTokenizer
from rl_core.engines.http import disconnected, error_detail, json_response, read_body
from rl_core.engines.protocol import (
    MSGPACK_TYPE,
    EndEvent,
    FaultEvent,
    GenerateBody,
    GenerateEvent,
    TokenEvent,
    parse_version,
)
from rl_core.engines.streams import EventStream
from rl_core.engines.vllm.messages import RoutesSource
from rl_core.engines.vllm.replica import VllmReplica
from rl_core.engines.vllm.tickets import Ticket
from rl_core.engines.vllm.upstream import Choice, Completion, SampledLogprob, Span, VllmInference
from rl_core.errors import EngineError, EngineUnreachable, RequestRefused, RlCoreError
from rl_core.types import FinishReason, Generated, Routes, VersionSpan

# The name that vLLM gives to weights before anybody named them: no sidecar was here yet.
_UNNAMED: Final = "default"
_BACKGROUND_PRIORITY: Final = 1


class VllmGenerateApi:
    """Handler of the endpoint. `vocab` is the model's own, which may be larger than the tokenizer's."""

    def __init__(
        self, replica: VllmReplica, inference: VllmInference, tokenizer: ChatTokenizer, *, slot: str, max_len: int,
        vocab: int,
    ) -> None:  # fmt: skip
        self._replica = replica
        self._inference = inference
        self._tokenizer = tokenizer
        self._slot, self._max_len, self._vocab = slot, max_len, vocab
        # A folder may name an end token that its model cannot sample; vLLM refuses those.
        self._stops = sorted(token for token in tokenizer.eos_ids if token < vocab)

    async def generate(self, request: Request) -> Response:
        """Answer with `Generated` as JSON, as MessagePack where the caller accepts it, or token by token."""
        body = await read_body(request, GenerateBody)
        self._check(body)
        admitted = self._replica.tickets.admitted(
            min_version=parse_version(body.min_version),
            exact_version=parse_version(body.exact_version),
            routes=body.return_routes,
            labelled=body.stream,
        )
        if body.stream:
            leaving = ExitStack()
            ticket = leaving.enter_context(admitted)
            return EventStream(self._events(body, ticket), closed=leaving.close, headers={})
        with admitted as ticket:
            result = await _unless_gone(request, ticket, self._whole(body, ticket))
        if MSGPACK_TYPE in request.headers.get("accept", ""):
            return Response(msgspec.msgpack.encode(result), media_type=MSGPACK_TYPE)
        return json_response(result)

    async def _whole(self, body: GenerateBody, ticket: Ticket) -> Generated:
        try:
            completion = await self._inference.whole(self._request(body, ticket))
        except EngineUnreachable as error:
            self._replica.lost(error)
            raise
        return await self._result(body, ticket, _Collected().add(completion))

    async def _events(self, body: GenerateBody, ticket: Ticket) -> AsyncGenerator[GenerateEvent, None]:
        collected, named = _Collected(), ""
        upstream = self._inference.stream({**self._request(body, ticket), "stream_options": {"include_usage": True}})
        try:
            while (completion := await ticket.run(_next_of(upstream))) is not None:
                for place, sampled in collected.add(completion).fresh:
                    version = ticket.version_of(place)
                    yield TokenEvent(
                        token=sampled.token_id,
                        logprob=_number(sampled.logprob),
                        version="" if version == named else version,
                        tops=_tops(sampled, body.top_logprobs),
                    )
                    named = version
            yield EndEvent(result=await self._result(body, ticket, collected))
        except RlCoreError as error:
            if isinstance(error, EngineUnreachable):
                self._replica.lost(error)
            yield FaultEvent(error=error_detail(error))
        finally:
            await upstream.aclose()

    def _check(self, body: GenerateBody) -> None:
        prompt = body.prompt_token_ids
        if body.slot not in (None, self._slot):
            raise RequestRefused(f"there is no weight slot {body.slot!r}; this engine has {self._slot}")
        if not prompt:
            raise RequestRefused("the prompt is empty; send at least one token")
        if len(prompt) >= self._max_len:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens; this engine holds {self._max_len} with the completion"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab:
            raise RequestRefused(f"prompt token ids must be in [0, {self._vocab})")

    def _request(self, body: GenerateBody, ticket: Ticket) -> dict[str, Any]:
        """VLLM's body. `ignore_eos` drops its own end tokens; ours stand in `stop_token_ids`."""
        sampling = body.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": min(sampling.max_tokens, self._max_len - len(body.prompt_token_ids)),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "stop_token_ids": self._stops,
            "logprobs": body.top_logprobs if body.stream else 0,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed % (1 << 63)
        return {
            "request_id": ticket.request_id,
            "token_ids": body.prompt_token_ids,
            "sampling_params": params,
            "priority": _BACKGROUND_PRIORITY if body.background else 0,
        }

    async def _result(self, body: GenerateBody, ticket: Ticket, collected: _Collected) -> Generated:
        tokens = [sampled.token_id for sampled in collected.tokens]
        routes = await self._routes(ticket, collected) if body.return_routes else None
        counters = self._replica.counters
        counters.requests_total += 1
        counters.aborted_total += collected.reason is FinishReason.ABORT
        counters.prompt_tokens_total += len(body.prompt_token_ids)
        counters.cached_tokens_total += collected.cached
        counters.generated_tokens_total += len(tokens)
        return Generated(
            token_ids=tokens,
            logprobs=[_number(sampled.logprob) for sampled in collected.tokens],
            text=self._tokenizer.decode(tokens),
            finish_reason=collected.reason,
            spans=_spans(collected.spans, len(tokens)),
            prompt_tokens=len(body.prompt_token_ids),
            cached_tokens=collected.cached,
            routes=routes,
        )

    async def _routes(self, ticket: Ticket, collected: _Collected) -> Routes | None:
        if collected.routes is not None:
            return _routes_of_npy(collected.routes)
        workers = self._replica.workers
        if not workers or workers[0].routes is not RoutesSource.RECORDER:
            return None
        kept = await self._inference.take_routes(ticket.request_id)
        if kept is None:
            return None
        return Routes(kept.tokens, kept.layers, kept.top_k, kept.dtype, _unbase64(kept.data))


class _Collected:
    """What vLLM has said of one request so far."""

    def __init__(self) -> None:
        self.tokens: list[SampledLogprob] = []
        self.fresh: list[tuple[int, SampledLogprob]] = []
        self.reason = FinishReason.ABORT
        self.spans: list[Span] = []
        self.routes: str | None = None
        self.cached = 0

    def add(self, completion: Completion) -> _Collected:
        """Take an answer, or one event of it; itself. Raises: EngineError."""
        self.fresh = []
        if completion.usage is not None and completion.usage.prompt_tokens_details is not None:
            self.cached = completion.usage.prompt_tokens_details.cached_tokens or 0
        for choice in completion.choices:
            self._add(choice)
        return self

    def _add(self, choice: Choice) -> None:
        tokens = choice.token_ids or []
        logprobs = (choice.logprobs.content or []) if choice.logprobs else []
        if [sampled.token_id for sampled in logprobs] != tokens:
            raise EngineError("vLLM gave logprobs of other tokens than it sampled")
        self.fresh += list(enumerate(logprobs, len(self.tokens)))
        self.tokens += logprobs
        self.spans = choice.weight_versions or self.spans
        self.routes = choice.routed_experts or self.routes
        if choice.finish_reason is not None:
            try:
                self.reason = FinishReason(choice.finish_reason)
            except ValueError as error:
                raise EngineError(f"vLLM ended the request with {choice.finish_reason!r}") from error


async def _unless_gone(request: Request, ticket: Ticket, work: Coroutine[Any, Any, Generated]) -> Generated:
    """The result of `work`, unless the client leaves first. Raises: ClientDisconnect, and what `work` raises."""
    gone = asyncio.ensure_future(disconnected(request.receive))
    running = asyncio.ensure_future(ticket.run(work))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return await running
    finally:
        gone.cancel()
        running.cancel()


async def _next_of(events: AsyncGenerator[Completion, None]) -> Completion | None:
    return await anext(events, None)


def _number(logprob: float | None) -> float:
    """VLLM writes a logprob of minus infinity as null; JSON has no infinity, and no sampled token has that."""
    if logprob is None:
        raise EngineError("vLLM sampled a token of no probability")
    return logprob


def _tops(sampled: SampledLogprob, wanted: int) -> list[tuple[int, float]]:
    """The likeliest `wanted` candidates: vLLM adds the sampled token to them where it is none."""
    ranked = [top for top in sampled.top_logprobs if top.logprob is not None and (top.rank or 0) <= wanted]
    return [(top.token_id, _number(top.logprob)) for top in sorted(ranked, key=lambda top: top.rank or 0)]


def _spans(spans: list[Span], tokens: int) -> list[VersionSpan]:
    """VLLM's spans, checked. Raises: EngineError for such as do not cover the tokens; EngineUnreachable."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= end:
            raise EngineError("vLLM's version spans do not follow one another")
        end = span.end
    if end != tokens:
        raise EngineError(f"vLLM's version spans cover {end} of {tokens} tokens")
    if any(span.version == _UNNAMED for span in spans):
        raise EngineUnreachable("vLLM was started again and is not attached yet; its answer has no version")
    return [VersionSpan(span.start, span.end, span.version) for span in spans]


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise EngineError(f"routed experts do not read: {error}") from error


def _routes_of_npy(text: str) -> Routes:
    """What vLLM's own flag returns: base64 of an `.npy` of `[tokens, layers, top_k]`."""
    try:
        rows = np.load(io.BytesIO(_unbase64(text)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineError(f"routed experts do not read: {error}") from error
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise EngineError(f"routed experts are {rows.dtype} of shape {rows.shape}, not [tokens, layers, top_k]")
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    if low < 0 or high > np.iinfo("uint16").max:
        raise EngineError(f"routed experts are between {low} and {high}, which are no experts' numbers")
    narrow = high <= np.iinfo("uint8").max
    packed = np.ascontiguousarray(rows, dtype="uint8" if narrow else "<u2")
    return Routes(rows.shape[0], rows.shape[1], rows.shape[2], "uint8" if narrow else "uint16", packed.tobytes())
