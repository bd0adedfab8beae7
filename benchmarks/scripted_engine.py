"""A tiny server that speaks the engine's streaming protocol and says what a script says: no model, known timing.

`python -m benchmarks.scripted_engine --port PORT` answers every prompt with the same token, one each `--token-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rl_core.engines.protocol import EndEvent, ErrorBody, ErrorDetail, GenerateBody, TokenEvent
from rl_core.types import FinishReason, Generated, VersionSpan

TOP_LOGPROB = -0.5
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What to answer. `status` other than 200 refuses; `breaks_after` tokens the connection is dropped."""

    tokens: Sequence[int] = ()
    text: str = ""
    finish: FinishReason = FinishReason.STOP
    token_s: float = 0.0
    status: int = 200
    code: str | None = None
    breaks_after: int | None = None


@dataclass
class ScriptedEngine:
    """Serves a script, and remembers what it was asked and how many readers left early."""

    script: Callable[[GenerateBody], Reply]
    asked: list[GenerateBody] = field(default_factory=list)
    aborted: int = 0
    port: int = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[ScriptedEngine]:
        """Listen while the block runs."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.aborted += 1
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except asyncio.IncompleteReadError:
            return False
        length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
        body = msgspec.json.decode(await reader.readexactly(length), type=GenerateBody)
        self.asked.append(body)
        reply = self.script(body)
        if reply.status != 200:
            error = msgspec.json.encode(ErrorBody(error=ErrorDetail(message="scripted", type="x", code=reply.code)))
            writer.write(f"HTTP/1.1 {reply.status} X\r\nContent-Length: {len(error)}\r\n\r\n".encode() + error)
            await writer.drain()
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        return await self._stream(body, reply, reader, writer)

    async def _stream(
        self, body: GenerateBody, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        version = body.exact_version or body.min_version or "scripted:0-0"
        tokens = list(reply.tokens)[: body.sampling.max_tokens]
        for place, token in enumerate(tokens):
            if place == reply.breaks_after:
                return False
            await _pause(reply.token_s, reader)
            if reader.at_eof():
                raise ConnectionError
            tops = [(token, TOP_LOGPROB)] * body.top_logprobs
            event = TokenEvent(token=token, logprob=TOP_LOGPROB, version="" if place else version, tops=tops)
            await _chunk(writer, b"data: " + msgspec.json.encode(event) + b"\n\n")
        if reply.breaks_after is not None:
            return False
        result = Generated(
            token_ids=tokens,
            logprobs=[TOP_LOGPROB] * len(tokens),
            text=reply.text,
            finish_reason=FinishReason.LENGTH if len(tokens) < len(reply.tokens) else reply.finish,
            spans=[VersionSpan(0, len(tokens), version)],
            prompt_tokens=len(body.prompt_token_ids),
        )
        await _chunk(writer, b"data: " + msgspec.json.encode(EndEvent(result=result)) + b"\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _pause(seconds: float, reader: asyncio.StreamReader) -> None:
    """Sleep, but no longer than the client stays."""
    while seconds > 0 and not reader.at_eof():
        await asyncio.sleep(min(seconds, _LOOK_S))
        seconds -= _LOOK_S


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def _serve(port: int, *, token: int, text: str, tokens: int, token_s: float) -> None:
    def script(body: GenerateBody) -> Reply:
        count = min(tokens, body.sampling.max_tokens)
        return Reply(tokens=[token] * count, text=text * count, token_s=0.0 if body.sampling.seed == 0 else token_s)

    async with ScriptedEngine(script).serving(port):
        await asyncio.Event().wait()


def main() -> None:
    """Parse the command line and serve until killed. A request with seed 0 is answered without pauses."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted_engine")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token", type=int, default=0)
    parser.add_argument("--text", default="a")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--token-ms", type=float, default=20.0)
    options = parser.parse_args()
    serving = _serve(
        options.port,
        token=options.token,
        text=options.text,
        tokens=options.tokens,
        token_s=options.token_ms / 1000,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serving)


if __name__ == "__main__":
    main()
