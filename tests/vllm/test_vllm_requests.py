"""Requests to a vLLM while versions come and go: none is lost, and each token is named after what sampled it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import vllm_rig as rig
from vllm_bench import Bench

from rl_core.chat import ChatTokenizer
from rl_core.engines.protocol import EndEvent, GenerateBody, TokenEvent
from rl_core.engines.vllm.upstream import VllmControl
from rl_core.errors import VersionUnavailable
from rl_core.types import FinishReason, Generated, KvMode, PauseMode, SamplingParams


def test_requests_in_flight_survive_twenty_swaps_with_spans_that_are_true(bench: Bench):
    tokens = {str(bench.sign(10 + step).ref): 10 + step for step in range(20)}
    versions = bench.line.versions[-20:]
    bench.sidecar.serve(versions[0])
    results, streams = asyncio.run(_swapping(bench, versions[1:]))
    assert all(result.finish_reason is FinishReason.LENGTH for result in results)
    assert sum(len(result.spans) - 1 for result in results) >= 10
    for result in results:
        told = [tokens[span.version] for span in result.spans for _ in range(span.start, span.end)]
        assert told == result.token_ids
    assert sum(len(stream[-1].result.spans) - 1 for stream in streams) >= 10
    for stream in streams:
        version, told = "", []
        for event in stream[:-1]:
            version = event.version or version
            told.append(tokens[version])
        assert told == [event.token for event in stream[:-1]] == stream[-1].result.token_ids
    assert bench.sidecar.metrics()["swaps_total"] >= 20


async def _swapping(bench: Bench, versions: list[rig.Version]) -> tuple[list[Generated], list[list]]:
    """Six callers ask without a break, two of them for streams. Between two swaps one of these gets a token."""
    over, came = asyncio.Event(), asyncio.Event()
    results: list[Generated] = []
    streams: list[list[TokenEvent | EndEvent]] = []
    async with bench.sidecar.client() as client:

        async def whole() -> None:
            while not over.is_set():
                results.append(await client.generate([1, 2, 3], SamplingParams(max_tokens=200)))

        async def streamed() -> None:
            body = GenerateBody(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=200))
            while not over.is_set():
                stream = []
                async for event in client.stream(body):
                    stream.append(event)
                    came.set()
                streams.append(stream)

        callers = [asyncio.ensure_future(whole()) for _ in range(4)] + [
            asyncio.ensure_future(streamed()) for _ in range(2)
        ]
        for place, version in enumerate(versions):
            came.clear()
            await came.wait()
            kv = KvMode.RECOMPUTE if place % 2 else KvMode.KEEP
            await asyncio.to_thread(bench.sidecar.serve, version, kv=kv)
        over.set()
        await asyncio.gather(*callers)
    return results, streams


def test_bounds_of_versions_are_kept(bench: Bench):
    first = bench.sign(40)
    bench.sidecar.serve(first)
    assert asyncio.run(bench.tokens(exact_version=first.ref)).token_ids == [40] * 4
    second = bench.sign(41)
    with pytest.raises(VersionUnavailable):
        asyncio.run(bench.tokens(min_version=second.ref))

    async def overtaken() -> None:
        """An answer of one exact version has two seconds to end; one that takes longer is given up."""
        async with bench.sidecar.client() as client:
            body = GenerateBody(
                prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=400), exact_version=first.name
            )
            ending = client.stream(body)
            held = [
                asyncio.ensure_future(client.generate([1, 2], SamplingParams(max_tokens=500), exact_version=first.ref))
                for _ in range(7)
            ]
            for _ in range(390):
                await anext(ending)
            await asyncio.to_thread(bench.sidecar.serve, second)
            *_, end = [event async for event in ending]
            assert isinstance(end, EndEvent)
            assert {span.version for span in end.result.spans} == {first.name}
            for ended in await asyncio.gather(*held, return_exceptions=True):
                if isinstance(ended, Generated):
                    assert {span.version for span in ended.spans} == {first.name}
                else:
                    assert isinstance(ended, VersionUnavailable)

    asyncio.run(overtaken())
    bench.serves(second, 41)


def test_the_openai_endpoints_pass_through(bench: Bench):
    version = bench.sign(ChatTokenizer.load(bench.model).encode("a")[0])
    bench.sidecar.serve(version)
    headers = {"Authorization": "Bearer inference-secret"}
    with httpx.Client(base_url=bench.sidecar.url, headers=headers, timeout=60) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["tiny"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.headers["X-Slipway-Version"] == version.name
        assert answer.json()["choices"][0]["message"]["content"] == "aaa"
        refused = http.post("/v1/chat/completions", json={**body, "min_version": str(bench.sign(50).ref)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_unavailable")
        lines = http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3, "stream": True}).text
        assert lines.rstrip().endswith("data: [DONE]")
        assert http.post("/v1/completions", json={"model": "other", "prompt": "x"}).status_code == 404
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
        assert http.get("/v1/models", headers={"Authorization": "Bearer nobody"}).status_code == 401
        for path in ("/collective_rpc", "/pause", "/inference/v1/generate"):
            assert http.post(path, json={}).status_code == 404  # vLLM's development mode stays behind the sidecar


async def caught(bench: Bench) -> asyncio.Future[Generated]:
    """An answer of 400 tokens that a pause with `keep` caught in its middle."""
    for _ in range(50):
        before = bench.sidecar.metrics()["decode_steps_total"]
        running = asyncio.ensure_future(bench.tokens(count=400))
        while bench.sidecar.metrics()["decode_steps_total"] <= before + 1:
            await asyncio.sleep(0.01)
        with bench.sidecar.control() as control:
            await asyncio.to_thread(control.pause, PauseMode.KEEP)
            await asyncio.sleep(0.3)
            if not running.done():
                return running
            await asyncio.to_thread(control.resume)
    raise AssertionError("every answer was faster than the pause")


async def test_a_reset_of_caches_that_did_nothing_is_told_from_one_that_did(bench: Bench):
    await asyncio.to_thread(bench.sidecar.serve, bench.sign(43))
    running = await caught(bench)
    plain = await asyncio.to_thread(httpx.post, f"{bench.url}/reset_prefix_cache")
    assert (plain.status_code, plain.json()) == (200, {"success": False})  # the request holds blocks
    vllm = VllmControl(bench.url)
    await asyncio.to_thread(vllm.drop_caches)
    vllm.close()
    with bench.sidecar.control() as control:
        await asyncio.to_thread(control.resume)
    assert (await running).token_ids == [43] * 400


async def test_pauses_are_those_of_the_control_protocol(bench: Bench):
    sidecar = bench.sidecar
    running = await caught(bench)
    with sidecar.control() as control:
        before = sidecar.metrics()["decode_steps_total"]
        await asyncio.sleep(0.5)
        assert sidecar.metrics()["decode_steps_total"] == before
        assert not running.done()
        assert sidecar.metrics()["paused"] == 1
        await asyncio.to_thread(control.pause, PauseMode.ABORT)
        cut = await running
        assert cut.finish_reason is FinishReason.ABORT
        assert 0 < len(cut.token_ids) == len(cut.logprobs) < 400
        held = asyncio.ensure_future(bench.tokens())
        await asyncio.sleep(0.3)
        assert not held.done()
        await asyncio.to_thread(control.resume)
        assert len((await held).token_ids) == 4
        running = await caught(bench)
        await asyncio.to_thread(control.resume)
        await asyncio.to_thread(control.pause, PauseMode.WAIT)
        assert len((await running).token_ids) == 400
        await asyncio.to_thread(control.resume)
