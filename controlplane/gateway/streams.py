"""An answer as server-sent events: recorded before `[DONE]`, and ended in the replicas when its reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.shapes import Finished, Shape, finish_reason
from controlplane.gateway.texts import Part
from controlplane.gateway.under_way import Choice, UnderWay
from controlplane.states import GenerationOutcome
from rl_core.engines.http import disconnected
from rl_core.engines.protocol import EndEvent, TokenEvent

SEND_TIMEOUT_S: Final = 30.0  # a reader that takes nothing for so long has left
_DONE: Final = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


async def watched(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first. Raises: ClientLeft."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    return working.result()


class AnswerStream(Response):
    """Sends an answer whose first tokens are there, and closes it."""

    media_type = "text/event-stream"

    def __init__(self, answering: UnderWay, shape: Shape, *, logprobs: bool, usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answering = answering
        self._shape = shape
        self._logprobs = logprobs
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        outcome: GenerationOutcome = GenerationOutcome.FAILED
        try:
            await _write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await watched(receive, self._send(send))
        except ClientLeft:
            outcome = GenerationOutcome.CANCELLED
        finally:
            await asyncio.shield(self._answering.close(outcome))

    async def _send(self, send: Send) -> None:
        """Raises: ClientLeft."""
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await _body(send, _event(chunk))
            await self._answering.record(GenerationOutcome.ANSWERED)
            await _body(send, _DONE, more=False)
        except OpenAiError as error:
            await self._answering.close(GenerationOutcome.FAILED)
            await _body(send, _event(error.body), more=False)

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        writers = [_ChoiceChunks(self._shape, choice, self._logprobs) for choice in self._answering.choices]
        for writer in writers:
            yield writer.opening()
        async with contextlib.aclosing(self._answering.events()) as events:
            async for choice, event in events:
                for chunk in writers[choice.index].of(event):
                    yield chunk
        if self._usage:
            yield self._shape.usage_chunk([self._finished(choice) for choice in self._answering.choices])

    def _finished(self, choice: Choice) -> Finished:
        return self._answering.finished(choice, [])


class _ChoiceChunks:
    """The chunks of one choice. Logprobs wait for the chunk of the text that their tokens made."""

    def __init__(self, shape: Shape, choice: Choice, logprobs: bool) -> None:
        self._shape = shape
        self._choice = choice
        self._logprobs = logprobs
        self._due: list[TokenEvent] = []
        self._calls = 0

    def opening(self) -> Any:
        """The first chunk."""
        return self._shape.opening(self._choice.index, self._choice.generation_id)

    def of(self, event: TokenEvent | EndEvent) -> list[Any]:
        """What an event adds."""
        text = self._choice.text
        if isinstance(event, TokenEvent):
            if self._logprobs:
                self._due.append(event)
            return self._pieces(text.push(event.token))
        chunks = self._pieces(text.finish(event.result.text))
        reason = finish_reason(event.result.finish_reason, called=text.given > 0)
        return [*chunks, self._shape.ending(self._choice.index, reason, logprobs=self._take())]

    def _pieces(self, parts: list[Part]) -> list[Any]:
        chunks = []
        for part in parts:
            chunks.append(self._shape.piece(self._choice.index, part, number=self._calls, logprobs=self._take()))
            self._calls += not isinstance(part, str)
        return chunks

    def _take(self) -> list[TokenEvent] | None:
        due, self._due = self._due, []
        return due if self._logprobs else None


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _body(send: Send, data: bytes, *, more: bool = True) -> None:
    await _write(send, {"type": "http.response.body", "body": data, "more_body": more})


async def _write(send: Send, message: dict[str, Any]) -> None:
    """Raises: ClientLeft when nobody takes it."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise ClientLeft from error
