"""OpenAI's streams through the sidecar, whose bounds hold to the end. The vLLM behind it is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from engine_factories import wait_until
from scripted_vllm import Bench, serving, version

ENDLESS = {"model": "tiny", "messages": [], "max_tokens": 1 << 15, "stream": True}


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with serving(tmp_path_factory.mktemp("scripted")) as made:
        wait_until(made.attached)
        made.target(1)
        yield made


async def read(response: httpx.Response, told: list[str]) -> None:
    async for line in response.aiter_lines():
        if line:
            told.append(line.removeprefix("data: "))


async def swap(bench: Bench, told: list[str]) -> None:
    """Once some have been read, swap."""
    async with asyncio.timeout(20):
        while len(told) < 3:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(bench.target, 2)


async def test_a_stream_of_one_exact_version_ends_with_it(bench: Bench):
    told: list[str] = []
    async with bench.http() as http:
        bound = {**ENDLESS, "exact_version": version(1)}
        async with http.stream("POST", "/v1/chat/completions", json=bound) as response:
            assert response.headers["X-Slipway-Version"] == version(1)
            async with asyncio.timeout(20):
                await asyncio.gather(read(response, told), swap(bench, told))
    *tokens, error, last = told
    assert set(tokens) == {"1"}
    assert '"code":"version_unavailable"' in error
    assert last == "[DONE]"
    await asyncio.to_thread(wait_until, lambda: not bench.vllm.streams and not len(bench.sidecar.replica.tickets))


async def test_a_stream_whose_reader_leaves_ends_in_vllm_and_makes_room(bench: Bench):
    async with bench.http() as http, http.stream("POST", "/v1/chat/completions", json=ENDLESS) as response:
        await anext(response.aiter_lines())
        assert (bench.vllm.streams, len(bench.sidecar.replica.tickets)) == (1, 1)
    await asyncio.to_thread(wait_until, lambda: not bench.vllm.streams and not len(bench.sidecar.replica.tickets))


async def test_a_stream_without_bounds_outlasts_a_swap(bench: Bench):
    told: list[str] = []
    async with bench.http() as http, http.stream("POST", "/v1/chat/completions", json=ENDLESS) as response:
        reading = asyncio.ensure_future(read(response, told))
        await swap(bench, told)
        async with asyncio.timeout(20):
            while told[-1] != "2":
                await asyncio.sleep(0.01)
        reading.cancel()
    assert sorted(told) == told
