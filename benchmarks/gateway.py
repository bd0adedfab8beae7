"""What the gateway adds to an engine's answers: real web process, real PostgreSQL and store, a scripted engine.

Eight streams at once, each asking the engine directly and through the gateway in turn, the order drawn by chance; every
answer through the gateway is recorded with its content. The engine, the gateway and the clients are processes of their
own.

- `added_ttft_p50_ms`, `added_ttft_p99_ms`: time to the first token through the gateway minus that of the engine
  asked directly, over all pairs; the engine takes 20 ms to each token;
- `added_per_token_us`: an answer of 500 tokens that the engine gives without a pause, its time through the gateway
  minus the direct one, for each token (one stream, in turn, median);
- `cpu_per_token_us`: processor time of the web process for each token of those answers, everything of a request in it;
- `direct_ttft_p50_ms`, `gateway_ttft_p50_ms`: both sides of the pairs; `recorded`: generations found in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import httpx
import psutil

from benchmarks.conductor import database
from benchmarks.measure import Progress
from benchmarks.web import free_ports, running, web_process

TOKEN_MS: Final = 20.0
TOKENS: Final = 12
LONG_TOKENS: Final = 500
STREAMS: Final = 8
_SECRET: Final = "benchmark"  # noqa: S105  # the scripted engine asks for none


@dataclass(frozen=True, slots=True)
class Side:
    """One way of asking: where, with what, and how the first token looks."""

    url: str
    headers: dict[str, str]
    body: Callable[[int, int], dict[str, object]]
    first: bytes


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """See the module's text."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(database(progress))
        from benchmarks import gateway_rows as rows

        ports = free_ports(2)
        folder = rows.tokenizer_folder()
        token = rows.token_of(folder, "a")
        stack.enter_context(running(_engine(ports[0], token), {}))
        lane = rows.lane(folder=folder, engine_url=f"http://127.0.0.1:{ports[0]}", token=_SECRET)
        web = stack.enter_context(web_process(ports[1]))
        sides = _sides(ports, lane)
        pairs = 320 if quick else 1600
        progress(f"{pairs} pairs of answers, {STREAMS} at once")
        ttfts = asyncio.run(_paired(sides, pairs))
        progress("answers without pauses")
        repeats = 5 if quick else 15
        long = asyncio.run(_long(sides, repeats, web))
        recorded = rows.recorded(lane)
        if recorded != pairs + STREAMS + repeats + 1:
            raise RuntimeError(f"{recorded} generations are recorded, not {pairs + STREAMS + repeats + 1}")
    added = sorted(gateway - direct for direct, gateway in ttfts)
    return {
        "added_ttft_p50_ms": 1000 * statistics.median(added),
        "added_ttft_p99_ms": 1000 * added[int(len(added) * 0.99)],
        "added_per_token_us": long.added_us,
        "cpu_per_token_us": long.cpu_us,
        "direct_ttft_p50_ms": 1000 * statistics.median(direct for direct, _ in ttfts),
        "gateway_ttft_p50_ms": 1000 * statistics.median(gateway for _, gateway in ttfts),
        "pairs": len(ttfts),
        "streams": STREAMS,
        "recorded": recorded,
    }


def _sides(ports: list[int], lane: object) -> dict[str, Side]:
    from benchmarks.gateway_rows import BenchLane

    assert isinstance(lane, BenchLane)

    def direct(tokens: int, seed: int) -> dict[str, object]:
        sampling = {"max_tokens": tokens, "seed": seed}
        return {"prompt_token_ids": lane.prompt, "sampling": sampling, "stream": True, "exact_version": lane.version}

    def through(tokens: int, seed: int) -> dict[str, object]:
        messages = [{"role": "user", "content": lane.text}]
        return {"model": lane.slug, "messages": messages, "max_tokens": tokens, "seed": seed, "stream": True}

    consent = {"X-Slipway-User": "user-1", "X-Slipway-Session": "s", "X-Slipway-Consent": "train"}
    return {
        "direct": Side(
            f"http://127.0.0.1:{ports[0]}/v1/generate",
            {"Authorization": f"Bearer {_SECRET}"},
            direct,
            b'"type":"token"',
        ),
        "gateway": Side(
            f"http://127.0.0.1:{ports[1]}/v1/chat/completions",
            {"Authorization": f"Bearer {lane.key}", **consent},
            through,
            b'"content":"a"',
        ),
    }


async def _ask(web: httpx.AsyncClient, side: Side, *, tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token, and to the end."""
    started, first, seen = time.perf_counter(), 0.0, b""
    async with web.stream("POST", side.url, json=side.body(tokens, seed), headers=side.headers) as reply:
        reply.raise_for_status()
        async for chunk in reply.aiter_raw():
            seen = (seen + chunk)[-20_000:] if not first else chunk
            if not first and side.first in seen:
                first = time.perf_counter() - started
    if not first or b"[DONE]" not in seen:
        raise RuntimeError(f"{side.url} did not answer to the end: {seen[-300:]!r}")
    return first, time.perf_counter() - started


async def _paired(sides: dict[str, Side], pairs: int) -> list[tuple[float, float]]:
    """Times to the first token, direct and through the gateway, of each pair."""
    results: list[tuple[float, float]] = []

    async def stream(number: int) -> None:
        rng = random.Random(number)
        async with _client() as web:
            for name in sides:  # warm: connections, route and key
                await _ask(web, sides[name], tokens=2, seed=1)
            await asyncio.sleep(rng.random() * TOKENS * TOKEN_MS / 1000)
            for _ in range(pairs // STREAMS):
                times = {}
                for name in rng.sample(["direct", "gateway"], 2):
                    times[name], _ = await _ask(web, sides[name], tokens=TOKENS, seed=1)
                results.append((times["direct"], times["gateway"]))

    await asyncio.gather(*(stream(number) for number in range(STREAMS)))
    return results


@dataclass(frozen=True, slots=True)
class _Long:
    added_us: float
    cpu_us: float


async def _long(sides: dict[str, Side], repeats: int, web_process: subprocess.Popen[bytes]) -> _Long:
    """Answers without pauses (seed 0), direct and through the gateway in turn."""
    process = psutil.Process(web_process.pid)
    differences, cpu = [], []
    async with _client() as web:
        for repeat in range(repeats + 1):
            _, direct = await _ask(web, sides["direct"], tokens=LONG_TOKENS, seed=0)
            before = sum(process.cpu_times()[:2])
            _, through = await _ask(web, sides["gateway"], tokens=LONG_TOKENS, seed=0)
            if repeat:
                cpu.append(sum(process.cpu_times()[:2]) - before)
                differences.append(through - direct)
    per_token = 1e6 / LONG_TOKENS
    return _Long(per_token * statistics.median(differences), per_token * statistics.fmean(cpu))


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as web:
        yield web


def _engine(port: int, token: int) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.scripted_engine", "--port", str(port), "--token", str(token)]
    return [*command, "--text", "a", "--token-ms", str(TOKEN_MS)]
