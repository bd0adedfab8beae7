"""OpenAI's endpoints on the engine: models, chat completions and completions, streaming too."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine
from rl_core.engines.http import json_response, read_body, wait_or_abort
from rl_core.engines.openai_shapes import ChatShape, CompletionShape, Shape
from rl_core.engines.protocol import ChatBody, CompletionBody, OpenAiBody, parse_version
from rl_core.engines.request import ActiveSequence
from rl_core.engines.request import Request as EngineRequest
from rl_core.engines.streams import EventStream, TextStream, TokenFeed
from rl_core.errors import RlCoreError
from rl_core.types import Generated

DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's own default for /v1/completions


@dataclass(frozen=True, slots=True)
class _Job:
    """The sequences that answer one call, in order of choice."""

    body: OpenAiBody
    slot: str
    requests: list[EngineRequest]
    shape: Shape


class OpenAiApi:
    """Handlers. `name` is the model's name; `name:slot` addresses one weight slot."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, *, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name
        self._born = int(time.time())

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        slots = self._engine.slots
        names = [self._name, *(f"{self._name}:{slot}" for slot in slots if len(slots) > 1)]
        entries = [{"id": name, "object": "model", "created": self._born, "owned_by": "slipway"} for name in names]
        return json_response({"object": "list", "data": entries})

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await read_body(request, ChatBody)
        prompt = self._tokenizer.render([message.as_dict() for message in body.messages])
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        room = max(self._engine.max_len - len(prompt), 1)
        shape = ChatShape(
            identity=f"chatcmpl-{uuid.uuid4().hex}", model=body.model or self._name, codec=self._tokenizer,
            logprobs=bool(body.logprobs), token_ids=body.return_token_ids,
        )  # fmt: skip
        requests = self._requests(
            body, [prompt], max_tokens=room if wanted is None else wanted, tops=body.top_logprobs or 0
        )
        return await self._answer(request, _Job(body, self._slot(body), requests, shape))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = await read_body(request, CompletionBody)
        shape = CompletionShape(
            identity=f"cmpl-{uuid.uuid4().hex}", model=body.model or self._name, codec=self._tokenizer,
            logprobs=body.logprobs is not None, token_ids=body.return_token_ids,
        )  # fmt: skip
        prompts = [self._tokenizer.encode(one) if isinstance(one, str) else one for one in body.prompts]
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        requests = self._requests(body, prompts, max_tokens=wanted, tops=body.logprobs or 0)
        return await self._answer(request, _Job(body, self._slot(body), requests, shape))

    def _requests(
        self, body: OpenAiBody, prompts: list[list[int]], *, max_tokens: int, tops: int
    ) -> list[EngineRequest]:
        minimum, exact = parse_version(body.min_version), parse_version(body.exact_version)
        return [
            EngineRequest(
                prompt=prompt,
                sampling=body.sampling(max_tokens=max_tokens, choice=choice),
                min_version=minimum,
                exact_version=exact,
                tops=tops,
            )
            for prompt in prompts
            for choice in range(body.choices)
        ]

    def _slot(self, body: OpenAiBody) -> str:
        """The slot that a call names, by field or in the model's name. Raises: HTTPException 404."""
        if body.slot is not None:
            return body.slot
        name, _, slot = (body.model or self._name).partition(":")
        if name != self._name or (slot and slot not in self._engine.slots):
            raise HTTPException(404, f"there is no model {body.model!r} here; this engine serves {self._name}")
        return slot or self._engine.slots[0]

    async def _answer(self, request: Request, job: _Job) -> Response:
        if job.body.stream:
            return self._stream(job)
        sequences = self._submit(job, None)
        results = await wait_or_abort(
            request, [sequence.future for sequence in sequences], lambda: self._abort(job, sequences)
        )
        headers = _version_header(results)
        return json_response(job.shape.whole(job.requests, results, sequences), headers=headers)

    def _stream(self, job: _Job) -> Response:
        feed = TokenFeed()
        sequences = self._submit(job, feed)
        version = self._engine.version(job.slot)
        return EventStream(
            self._events(job, sequences, feed),
            closed=lambda: self._abort(job, sequences),
            headers={"X-Slipway-Version": str(version or "")},
        )

    def _submit(self, job: _Job, feed: TokenFeed | None) -> list[ActiveSequence]:
        sequences: list[ActiveSequence] = []
        try:
            for choice, one in enumerate(job.requests):
                on_token = None if feed is None else feed.listener(choice)
                sequences.append(self._engine.submit(one, slot=job.slot, on_token=on_token))
        except RlCoreError:
            self._abort(job, sequences)
            raise
        if feed is not None:
            for choice, sequence in enumerate(sequences):
                feed.watch(choice, sequence)
        return sequences

    def _abort(self, job: _Job, sequences: list[ActiveSequence]) -> None:
        for sequence in sequences:
            if not sequence.future.done():
                self._engine.abort(sequence, slot=job.slot)

    async def _events(self, job: _Job, sequences: list[ActiveSequence], feed: TokenFeed) -> AsyncGenerator[Any, None]:
        texts = [TextStream(self._tokenizer, job.body.stops) for _ in sequences]
        for choice in range(len(sequences)):
            if (opening := job.shape.opening(choice)) is not None:
                yield opening
        pending = len(sequences)
        while pending:
            choice, token = await feed.get()
            if token is not None:
                yield job.shape.piece(choice, texts[choice].push(token.token), token)
                continue
            pending -= 1
            error = sequences[choice].future.exception()
            if error is not None:
                code = error.code if isinstance(error, RlCoreError) else None
                yield {"error": {"message": str(error), "type": "server_error", "code": code, "param": None}}
                return
            result = sequences[choice].future.result()
            yield job.shape.ending(choice, texts[choice].finish(result.text), result)
        if job.body.usage_in_stream:
            yield job.shape.usage_chunk(job.requests, [sequence.future.result() for sequence in sequences])


def _version_header(results: list[Generated]) -> dict[str, str]:
    """The versions that sampled the answer, in order of first use."""
    versions = dict.fromkeys(span.version for result in results for span in result.spans)
    return {"X-Slipway-Version": ",".join(versions)}
