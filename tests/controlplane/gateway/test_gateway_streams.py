"""Streams as OpenAI's library reads them, from a real engine through a real socket."""

import asyncio

import engine_process as server
import httpx
import openai
import pytest
from asgiref.sync import sync_to_async

from controlplane.models import Generation, Lane, Release
from controlplane.states import GenerationOutcome
from rl_core.engines.client import EngineClient
from rl_core.store import open_store
from rl_core.types import PauseMode, SamplingParams, Trajectory
from tests.controlplane.gateway.gateway_rig import MESSAGES, generation_of, until
from tests.lane_rows import candidate_version

pytestmark = pytest.mark.django_db(transaction=True)

TRAIN = {"X-Slipway-User": "user-1", "X-Slipway-Consent": "train"}


async def read(stream):
    """Texts by choice, finish reasons by choice, every chunk."""
    texts, reasons, chunks = {}, {}, []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


async def test_a_stream_says_what_the_whole_answer_says(world, client):
    options = {"model": "assistant", "messages": MESSAGES, "max_tokens": 40, "seed": 5, "extra_headers": TRAIN}
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    texts, reasons, chunks = await read(stream)
    assert texts == {0: whole.choices[0].message.content}
    assert reasons == {0: whole.choices[0].finish_reason} == {0: "length"}
    assert sum(bool(choice.delta.content) for chunk in chunks for choice in chunk.choices) > 10
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{chunks[0].choices[0].generation_id}"}
    rows = [await generation_of(answer) for answer in (whole, chunks[0])]
    assert [row.sampled_tokens for row in rows] == [40, 40]
    assert rows[0].prompt_hash == rows[1].prompt_hash
    assert all(0 < row.first_token_ms < row.latency_ms for row in rows)


async def test_the_generation_is_recorded_before_the_stream_is_done(world, served):
    """When `[DONE]` is read the row is there; while tokens come it is not."""
    secret = await sync_to_async(world.key)()
    body = {"model": "assistant", "messages": MESSAGES, "max_tokens": 30, "stream": True}
    headers = {"Authorization": f"Bearer {secret}"}
    seen = []
    async with (
        httpx.AsyncClient() as web,
        web.stream("POST", f"{served}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                seen.append((line == "data: [DONE]", await Generation.objects.acount()))
    assert seen[0] == (False, 0)
    assert seen[-1] == (True, 1)
    assert [done for done, _ in seen].count(True) == 1


async def test_choices_are_generations_of_their_own(world, client, settings):
    options = {"model": "assistant", "messages": MESSAGES, "max_tokens": 12, "seed": 7, "n": 3, "extra_headers": TRAIN}
    whole = await client.chat.completions.create(**options)
    texts, reasons, chunks = await read(await client.chat.completions.create(**options, stream=True))
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert reasons == dict.fromkeys(range(3), "length")
    assert whole.usage.completion_tokens == 36
    rows = [await generation_of(choice) for choice in whole.choices]
    assert len({row.id for row in rows}) == 3
    assert whole.id == f"chatcmpl-{rows[0].id}"
    store = open_store(settings.STORE_URL)
    for row, choice in zip(rows, whole.choices, strict=True):
        trajectory = Trajectory.from_bytes(store.get_blob(row.content_key))
        assert trajectory.messages[-1].content == choice.message.content
    opened = {
        choice.index: choice.generation_id
        for chunk in chunks
        for choice in chunk.choices
        if hasattr(choice, "generation_id")
    }
    assert await Generation.objects.filter(id__in=opened.values()).acount() == 3


async def test_logprobs_are_those_that_were_sampled(world, client, settings):
    options = {"model": "assistant", "messages": MESSAGES, "max_tokens": 20, "seed": 2, "extra_headers": TRAIN}
    options |= {"logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(**options)
    _, _, chunks = await read(await client.chat.completions.create(**options, stream=True))
    streamed = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in whole.choices[0].logprobs.content]
    assert all(len(entry.top_logprobs) == 3 for entry in streamed)
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[2].logprob for entry in streamed)
    row = await generation_of(whole)
    segment = Trajectory.from_bytes(open_store(settings.STORE_URL).get_blob(row.content_key)).segments[0]
    assert segment.logprobs[row.prompt_tokens :] == [entry.logprob for entry in streamed]


async def test_completions_of_texts_and_tokens(world, client):
    options = {"model": "assistant", "max_tokens": 6, "seed": 1, "logprobs": 2, "extra_headers": TRAIN}
    whole = await client.completions.create(**options, prompt=[[1, 2, 3], [4, 5]], n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.id.startswith("cmpl-")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 24)
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.top_logprobs) == 6
    assert (await generation_of(whole.choices[2])).prompt_tokens == 2
    stream = await client.completions.create(**options, prompt="Hello", stream=True)
    texts, reasons, _ = await read(stream)
    again = await client.completions.create(**options, prompt="Hello")
    assert texts == {0: again.choices[0].text}
    assert reasons == {0: "length"}
    assert (await client.completions.create(model="assistant", prompt="hi")).usage.completion_tokens == 16
    for prompt in ([], [[]], "", [1, "a"], [10**9], [-1], ["x"] * 9):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="assistant", prompt=prompt)
        assert caught.value.param == "prompt"


async def test_stop_strings_are_cut_off_and_kept_in_the_record(world, client, settings):
    options = {"model": "assistant", "prompt": "ab", "max_tokens": 100, "temperature": 0, "extra_headers": TRAIN}
    text = (await client.completions.create(**options)).choices[0].text
    stop = next(
        text[at : at + 2] for at in range(5, len(text)) if text[at : at + 2].isascii() and len(text[at : at + 2]) == 2
    )
    whole = await client.completions.create(**options, stop=stop)
    texts, reasons, _ = await read(await client.completions.create(**options, stop=stop, stream=True))
    assert texts == {0: whole.choices[0].text} == {0: text[: text.index(stop)]}
    assert reasons == {0: "stop"} == {0: whole.choices[0].finish_reason}
    row = await generation_of(whole)
    assert row.sampling["stop"] == []
    assert not row.trainable
    content = Trajectory.from_bytes(open_store(settings.STORE_URL).get_blob(row.content_key))
    assert stop in content.messages[-1].content


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_generation(world, client, engine, stream):
    """The engine stops, and what there was is recorded as cancelled."""
    with engine.control() as control:
        before = control.metrics()["aborted_total"]
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="assistant", messages=MESSAGES, max_tokens=480, stream=stream, extra_headers=TRAIN
            )
        )
        if stream:
            answer = await asking
            await anext(aiter(answer))
            await answer.close()
        else:
            began = control.metrics()["generated_tokens_total"]
            await until_async(lambda: control.metrics()["generated_tokens_total"] > began + 20)
            asking.cancel()
        await until(Generation.objects.aexists)
        await until_async(lambda: control.metrics()["aborted_total"] > before)
    row = await Generation.objects.aget()
    assert (row.outcome, row.finish_reason, row.trainable) == (GenerationOutcome.CANCELLED, "abort", False)
    assert 0 < row.sampled_tokens < 480
    assert row.user_hash


async def until_async(condition, *, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.005)


async def test_leaving_before_the_first_token_is_recorded_too(world, client, engine):
    with engine.control() as control:
        control.pause(PauseMode.KEEP)
        try:
            asking = asyncio.create_task(
                client.chat.completions.create(model="assistant", messages=MESSAGES, stream=True)
            )
            await until_async(lambda: control.metrics()["waiting"] + control.metrics()["running"] == 1)
            asking.cancel()
            await until(Generation.objects.aexists)
            await until_async(lambda: control.metrics()["waiting"] + control.metrics()["running"] == 0)
        finally:
            control.resume()
    row = await Generation.objects.aget()
    assert (row.outcome, row.sampled_tokens, row.first_token_ms) == (GenerationOutcome.CANCELLED, 0, None)


async def test_a_full_engine_is_429_with_advice_and_no_generation(bare, client, folder, tmp_path):
    with server.running_engine(folder, tmp_path / "state", **{"max-waiting": 1, "max-seqs": 1}) as small:
        await sync_to_async(bare.hold)(small, bare.version())
        await sync_to_async(bare.place)(small.url)
        with small.control() as control:
            control.pause(PauseMode.KEEP)
            async with EngineClient(small.url, server.INFERENCE_TOKEN) as direct:
                queued = asyncio.create_task(direct.generate([1], SamplingParams(max_tokens=1)))
                await until_async(lambda: control.metrics()["waiting"] == 1)
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.chat.completions.create(model="assistant", messages=MESSAGES)
                control.resume()
                await queued
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["Retry-After"] == "1"
    assert not await Generation.objects.aexists()


async def test_too_many_requests_at_once_are_turned_away(world, client, engine, settings):
    settings.GATEWAY_MAX_REQUESTS = 1
    with engine.control() as control:
        control.pause(PauseMode.KEEP)
        try:
            first = asyncio.create_task(
                client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=1)
            )
            await until_async(lambda: control.metrics()["waiting"] == 1)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="assistant", messages=MESSAGES)
        finally:
            control.resume()
        assert (await first).usage.completion_tokens == 1
    # The place is free again.
    assert (await client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=1)).choices


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_before_its_first_token_is_replaced_by_another(
    bare, client, folder, tmp_path, stream
):
    """The request waits in one replica's queue when that is killed; the other answers, and the client sees nothing."""
    with (
        server.running_engine(folder, tmp_path / "a") as one,
        server.running_engine(folder, tmp_path / "b") as other,
        one.control() as control_one,
        other.control() as control_other,
    ):
        for number, (engine, control) in enumerate([(one, control_one), (other, control_other)]):
            await sync_to_async(bare.hold)(engine, bare.version())
            await sync_to_async(bare.place)(engine.url, name=f"serving-{number}")
            control.pause(PauseMode.KEEP)
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="assistant", messages=MESSAGES, max_tokens=5, stream=stream, extra_headers=TRAIN
            )
        )
        waiting = [lambda: control_one.metrics()["waiting"] == 1, lambda: control_other.metrics()["waiting"] == 1]
        await until_async(lambda: any(condition() for condition in waiting))
        chosen, rest = (one, control_other) if waiting[0]() else (other, control_one)
        chosen.process.kill()
        await until_async(lambda: rest.metrics()["waiting"] == 1)
        rest.resume()
        answer = await asking
        if stream:
            texts, _, chunks = await read(answer)
            assert texts[0]
            answer = chunks[0]
    row = await Generation.objects.aget()
    assert (row.outcome, row.sampled_tokens) == (GenerationOutcome.ANSWERED, 5)
    assert answer.id.endswith(str(row.id))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_after_its_first_token_breaks_the_answer_off(bare, client, folder, tmp_path, stream):
    """What was said cannot be taken back: the client is told, and the part that there was is recorded as failed."""
    with server.running_engine(folder, tmp_path / "state") as doomed:
        await sync_to_async(bare.hold)(doomed, bare.version())
        await sync_to_async(bare.place)(doomed.url)
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="assistant", messages=MESSAGES, max_tokens=480, stream=stream, extra_headers=TRAIN
            )
        )
        if stream:
            answer = await asking
            chunks = aiter(answer)
            await anext(chunks)
            doomed.process.kill()
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in chunks:
                    pass
        else:
            with doomed.control() as control:
                await until_async(lambda: control.metrics()["generated_tokens_total"] > 5)
            doomed.process.kill()
            with pytest.raises(openai.InternalServerError, match="broke off"):
                await asking
    await until(Generation.objects.aexists)
    row = await Generation.objects.aget()
    assert (row.outcome, row.finish_reason, row.trainable) == (GenerationOutcome.FAILED, "abort", False)
    assert row.sampled_tokens > 0
    assert row.first_token_ms > 0
    assert row.content_key


async def test_a_swap_under_way_is_followed_by_the_route(world, client, engine):
    """The lane is pointed elsewhere within the route's second: the request finds the new version, not an error."""
    assert await client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=2)
    other = await sync_to_async(candidate_version)(world)
    await sync_to_async(world.hold)(engine, other)
    await sync_to_async(world.place)(engine.url, versions={"default": other})
    await Lane.objects.filter(pk=world.lane.pk).aupdate(promoted_version=other)
    answer = await client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=2)
    assert answer.system_fingerprint == str(other)
    assert (await generation_of(answer)).version_id == other.id
    assert not await Release.objects.aexists()
