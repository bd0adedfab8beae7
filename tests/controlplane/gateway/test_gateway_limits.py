"""Time-outs, failover and faults, with scripted replicas that misbehave in known ways."""

import contextlib

import httpx
import openai
import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from benchmarks.scripted_engine import Reply, ScriptedEngine
from controlplane.gateway import answering
from controlplane.models import Generation
from controlplane.states import GenerationOutcome
from rl_core.types import FinishReason
from tests.controlplane.gateway.gateway_rig import MESSAGES, generation_of

pytestmark = pytest.mark.django_db(transaction=True)

GOOD = Reply(tokens=[64, 65, 66], text="abc")
TRAIN = {"X-Slipway-User": "user-1", "X-Slipway-Consent": "train"}


@contextlib.asynccontextmanager
async def replicas(world, *replies):
    """One scripted replica for each reply."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for number, reply in enumerate(replies):
            engine = ScriptedEngine(lambda body, reply=reply: reply)
            await stack.enter_async_context(engine.serving())
            await sync_to_async(world.place)(engine.url, name=f"serving-{number}")
            engines.append(engine)
        yield engines


async def ask(client, **options):
    return await client.chat.completions.create(model="assistant", messages=MESSAGES, extra_headers=TRAIN, **options)


async def read_into(texts, stream):
    async for chunk in stream:
        texts += [choice.delta.content or "" for choice in chunk.choices]


BAD = {
    "busy": Reply(status=429, code="engine_busy"),
    "gone": Reply(status=503, code="engine_error"),
    "other version": Reply(status=409, code="version_unavailable"),
    "dropped": Reply(tokens=[65], breaks_after=0),
    "silent": Reply(tokens=[65], token_s=30),
    "stopped": Reply(tokens=[], finish=FinishReason.ABORT),
    "fault": Reply(status=500),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("bad", BAD)
async def test_another_replica_answers_when_the_first_gives_no_token(bare, client, settings, bad, stream):
    """Whichever of three is asked first: two are bad, and the good one answers."""
    if bad == "silent":
        settings.GATEWAY_FIRST_TOKEN_S = 2
    async with replicas(bare, BAD[bad], BAD[bad], GOOD) as engines:
        answer = await ask(client, stream=stream)
        if stream:
            chunks = [chunk async for chunk in answer]
            assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "abc"
            answer = chunks[0]
        assert len(engines[2].asked) == 1
    row = await generation_of(answer)
    assert (row.outcome, row.sampled_tokens) == (GenerationOutcome.ANSWERED, 3)


@pytest.mark.parametrize(
    ("bad", "status", "code", "recorded"),
    [
        ("busy", 429, "rate_limit_exceeded", 0),
        ("gone", 503, "no_replica", 1),
        ("other version", 503, "no_replica", 1),
        ("dropped", 503, "no_replica", 1),
        ("silent", 504, "timeout", 1),
        ("fault", 503, "no_replica", 1),
    ],
)
async def test_what_the_client_is_told_when_no_replica_gives_a_token(
    bare, client, settings, bad, status, code, recorded
):
    if bad == "silent":
        settings.GATEWAY_FIRST_TOKEN_S = 0.2
    async with replicas(bare, BAD[bad], BAD[bad]) as engines:
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, stream=True)
        assert all(engine.asked for engine in engines)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    assert await Generation.objects.filter(outcome=GenerationOutcome.FAILED).acount() == recorded


async def test_a_replica_that_failed_is_asked_last_for_a_while(bare, client, monkeypatch):
    monkeypatch.setattr("controlplane.gateway.replicas.AVOID_FAILED_S", 600.0)
    async with replicas(bare, BAD["gone"], GOOD) as engines:
        for _ in range(6):
            await ask(client)
        assert len(engines[1].asked) == 6
        assert len(engines[0].asked) <= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_tried_again_after_the_first_token(bare, client, stream):
    async with replicas(bare, *[Reply(tokens=[64] * 9, text="a" * 9, breaks_after=4)] * 2) as engines:
        if stream:
            texts = []
            answer = await ask(client, stream=True)
            with pytest.raises(openai.APIError, match="broke off"):
                await read_into(texts, answer)
            assert "".join(texts) == "aaaa"
        else:
            with pytest.raises(openai.InternalServerError, match="broke off"):
                await ask(client)
        assert sum(len(engine.asked) for engine in engines) == 1
    row = await Generation.objects.aget()
    assert (row.outcome, row.sampled_tokens) == (GenerationOutcome.FAILED, 4)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_takes_too_long_is_cut_off(bare, client, settings, stream):
    settings.GATEWAY_TIMEOUT_S = 3
    async with replicas(bare, Reply(tokens=[65] * 100, token_s=0.1)) as [engine]:
        if stream:
            with pytest.raises(openai.APIError, match="longer than 3 s"):
                async for _ in await ask(client, stream=True):
                    pass
        else:
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(client)
            assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert len(engine.asked) == 1
    row = await Generation.objects.aget()
    assert row.outcome == GenerationOutcome.FAILED
    assert 0 < row.sampled_tokens < 100


async def test_one_of_several_choices_that_fails_fails_the_answer(bare, client):
    def script(body):
        return Reply(tokens=[65] * 9, breaks_after=3) if body.sampling.seed == 8 else GOOD

    engine = ScriptedEngine(script)
    async with engine.serving():
        await sync_to_async(bare.place)(engine.url)
        with pytest.raises(openai.InternalServerError):
            await ask(client, n=3, seed=7)
    assert await Generation.objects.filter(outcome=GenerationOutcome.FAILED).acount() == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_cannot_be_recorded_is_no_answer(bare, served, monkeypatch, stream):
    def refuse(*args, **options):
        raise OperationalError("the database is gone")

    monkeypatch.setattr(answering, "generation_record", refuse)
    headers = {"Authorization": f"Bearer {await sync_to_async(bare.key)()}"}
    body = {"model": "assistant", "messages": MESSAGES, "stream": stream}
    async with replicas(bare, GOOD), httpx.AsyncClient() as web:
        reply = await web.post(f"{served}/v1/chat/completions", json=body, headers=headers)
    if stream:
        assert reply.status_code == 200
        assert "[DONE]" not in reply.text
        assert '"code":"unavailable"' in reply.text.splitlines()[-2]
    else:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")


async def test_a_session_meets_the_same_replica_again(bare, client):
    async with replicas(bare, GOOD, GOOD, GOOD) as engines:
        for session in ("s1", "s2", "s3", "s4", "s5"):
            before = [len(engine.asked) for engine in engines]
            for _ in range(3):
                await client.chat.completions.create(
                    model="assistant", messages=MESSAGES, extra_headers={"X-Slipway-Session": session}
                )
            asked = [len(engine.asked) - count for engine, count in zip(engines, before, strict=True)]
            assert sorted(asked) == [0, 0, 3]


async def test_connections_to_replicas_are_kept(bare, client):
    connections = []

    class Counting(ScriptedEngine):
        async def _connection(self, reader, writer):
            connections.append(writer)
            await super()._connection(reader, writer)

    engine = Counting(lambda body: GOOD)
    async with engine.serving():
        await sync_to_async(bare.place)(engine.url)
        for _ in range(5):
            await ask(client)
    assert len(engine.asked) == 5
    assert len(connections) == 1
