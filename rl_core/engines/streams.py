"""Server-sent events: text as it can be shown, and a response that notices when its reader leaves. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rl_core.engines.http import disconnected
from rl_core.engines.stops import cut_at_stop

if TYPE_CHECKING:
    from rl_core.engines.request import ActiveSequence, OnToken, TextCodec
    from rl_core.engines.sampling import Sampled

# How many tokens of context a decoder needs so that the text of the next one is right.
_CONTEXT_TOKENS: Final = 8
_PARTIAL: Final = "\ufffd"
LAST_EVENT: Final = b"data: [DONE]\n\n"


class StreamEvent(NamedTuple):
    """One thing that a choice of a stream reports: a token, or its end."""

    choice: int
    token: Sampled | None


class TokenFeed:
    """Hands tokens and ends of sequences from the decode thread to the event loop that made the feed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def listener(self, choice: int) -> OnToken:
        """What the engine calls with each token of a choice."""

        def on_token(token: Sampled) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, StreamEvent(choice, token))

        return on_token

    def watch(self, choice: int, sequence: ActiveSequence) -> None:
        """Report the end of a choice's sequence, after its tokens."""

        def ended(_: object) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, StreamEvent(choice, None))

        sequence.future.add_done_callback(ended)

    async def get(self) -> StreamEvent:
        """The next event."""
        return await self._events.get()


class TextStream:
    """Turns tokens into pieces of text: whole characters only, nothing of a stop string or of what may become one."""

    def __init__(self, codec: TextCodec, stops: tuple[str, ...]) -> None:
        self._codec = codec
        self._stops = stops
        self._tokens: list[int] = []
        self._decoded = 0
        self._text = ""
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        self._tokens.append(token)
        context = self._tokens[max(0, self._decoded - _CONTEXT_TOKENS) : self._decoded]
        before = self._codec.decode(context)
        after = self._codec.decode([*context, *self._tokens[self._decoded :]])
        if after.endswith(_PARTIAL) and len(self._tokens) - self._decoded < _CONTEXT_TOKENS:
            return ""
        self._decoded = len(self._tokens)
        self._text += after[len(before) :]
        return self._show(len(cut_at_stop(self._text, self._stops)) - self._withheld())

    def finish(self, text: str) -> str:
        """The rest, given the whole text."""
        self._text = text
        return self._show(len(cut_at_stop(text, self._stops)))

    def _withheld(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : max(end, self._shown)]
        self._shown = max(end, self._shown)
        return piece


class ByteStream(Response):
    """Sends server-sent events as they come. `closed` is called when the stream ends, also when its reader left."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], *, closed: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._chunks = chunks
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            self._closed()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """Encodes what it sends."""

    def __init__(
        self, events: AsyncGenerator[Any, None], *, closed: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(_encoded(events), closed=closed, headers=headers)


async def _encoded(events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield encode_event(event)
    yield LAST_EVENT


def encode_event(event: Any) -> bytes:
    """One event, of a value that msgspec can encode."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
