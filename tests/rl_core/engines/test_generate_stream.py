"""Token-in/token-out generation as a stream: the same tokens, one by one, and every way in which it may end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import engine_factories as make
import engine_process as server
import msgspec
import pytest

from rl_core.delta import Base, publish_delta, publish_snapshot
from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import EndEvent, GenerateBody, TokenEvent
from rl_core.errors import EngineUnreachable, RequestRefused, VersionUnavailable
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import FinishReason, PauseMode, Routes, SamplingParams, VersionRef

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EngineProcess]:
    folder = make.endless_model_folder(tmp_path_factory.mktemp("models") / "m", routed=True)
    with server.running_engine(folder, tmp_path_factory.mktemp("state")) as process:
        yield process


def body(**changes: object) -> GenerateBody:
    sampling = SamplingParams(max_tokens=12, seed=3)
    return msgspec.structs.replace(GenerateBody(prompt_token_ids=PROMPT, sampling=sampling), **changes)


async def read(client: EngineClient, wanted: GenerateBody) -> tuple[list[TokenEvent], EndEvent]:
    *tokens, end = [event async for event in client.stream(wanted)]
    assert isinstance(end, EndEvent)
    return tokens, end


async def held(
    client: EngineClient, control: ControlClient
) -> tuple[AsyncGenerator[TokenEvent | EndEvent], TokenEvent]:
    """A stream paused in its middle, however slow this process is, and its first token."""
    while True:
        events = client.stream(body(sampling=SamplingParams(max_tokens=450)))
        first = await anext(events)
        assert isinstance(first, TokenEvent)
        control.pause(PauseMode.KEEP)
        if control.metrics()["running"]:
            return events, first
        control.resume()
        await events.aclose()


async def test_a_stream_says_what_the_whole_answer_says(engine: server.EngineProcess) -> None:
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        whole = await client.generate(PROMPT, SamplingParams(max_tokens=12, seed=3), return_routes=True)
        tokens, end = await read(client, body(return_routes=True, top_logprobs=2))
        await read(client, body())
        assert len(client._http._transport._inner._pool.connections) == 1  # it was read to its end, and so kept
    assert [one.token for one in tokens] == end.result.token_ids == whole.token_ids
    assert [one.logprob for one in tokens] == end.result.logprobs
    assert end.result.text == whole.text
    assert isinstance(end.result.routes, Routes)
    assert end.result.routes == whole.routes
    assert all(len(one.tops) == 2 and one.tops[0][1] >= one.tops[1][1] for one in tokens)


async def test_refusals_come_before_the_stream(engine: server.EngineProcess) -> None:
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        with pytest.raises(VersionUnavailable):
            await read(client, body(exact_version="x:0-1"))
        with pytest.raises(RequestRefused, match="no weight slot"):
            await read(client, body(slot="nowhere"))
    async with EngineClient(f"http://127.0.0.1:{server.free_ports(1)[0]}", "x") as client:
        with pytest.raises(EngineUnreachable):
            await read(client, body())


async def test_leaving_the_stream_aborts_the_generation(engine: server.EngineProcess) -> None:
    with engine.control() as control:
        before = control.metrics()["aborted_total"]
        async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
            events, _ = await held(client, control)
            await events.aclose()
            while control.metrics()["aborted_total"] == before:
                await asyncio.sleep(0.005)
            assert control.metrics()["running"] == 0
        control.resume()


async def test_every_token_names_its_version_across_a_swap(tmp_path: Path) -> None:
    folder = make.endless_model_folder(tmp_path / "m")
    tensors = read_checkpoint(folder)
    store = open_store((tmp_path / "state" / "store").as_uri())
    first, second = (VersionRef("line", 0, number) for number in range(2))
    old = publish_snapshot(store, tensors, key_prefix="snapshots/line/0-0/0", version=first)
    base = Base(version=str(first), root=old.root, manifest=old.manifest_key)
    changed = {**tensors, **make.perturbed(tensors, seed=1, share=0.5)}
    new = publish_delta(store, old=tensors, new=changed, version=second, base=base, fence=0)
    with server.running_engine(folder, tmp_path / "state") as engine, engine.control() as control:
        control.set_target(version=str(first), root=old.root, manifest=old.manifest_key)
        control.wait_version(str(first))
        async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
            events, first_token = await held(client, control)
            control.set_target(version=str(second), root=new.root, manifest=new.manifest_key)
            control.wait_version(str(second))
            control.resume()
            seen = [first_token, *[event async for event in events]]
    end = seen.pop()
    assert isinstance(end, EndEvent)
    named = [(place, event.version) for place, event in enumerate(seen) if event.version]
    assert named == [(span.start, span.version) for span in end.result.spans]
    assert [version for _, version in named] == [str(first), str(second)]


@pytest.mark.parametrize("killed", [True, False])
async def test_an_engine_that_ends_breaks_the_stream_off(tmp_path: Path, killed: bool) -> None:
    folder = make.endless_model_folder(tmp_path / "m")
    with server.running_engine(folder, tmp_path / "state") as engine, engine.control() as control:
        async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
            events, _ = await held(client, control)
            if killed:
                engine.process.kill()
                with pytest.raises(EngineUnreachable):
                    [event async for event in events]
            else:
                engine.process.terminate()
                end = [event async for event in events][-1]
                assert isinstance(end, EndEvent)
                assert end.result.finish_reason is FinishReason.ABORT
