"""A session's calls through the web process: OpenAI's library, a scripted engine, the real database and store."""

import asyncio
import json
import uuid

import httpx
import openai
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from benchmarks.scripted_engine import TOP_LOGPROB, Reply, ScriptedEngine
from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.state import SESSION_CALLS, Gateway
from controlplane.models import Event, Generation, RolloutCall, RolloutGroup, RolloutSession
from controlplane.services.rollout_sessions import calls_of, rollout_session_end
from controlplane.states import GroupState, Scope
from rl_core import signing
from rl_core.chat import ChatTokenizer
from rl_core.environments.remote.capture import assemble
from rl_core.store import open_store
from rl_core.types import FinishReason, SamplingParams
from tests.remote_rows import SECRET, age, played_elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
        },
    }
]


@pytest.fixture
def chat(folder):
    return ChatTokenizer.load(folder)


@pytest_asyncio.fixture(autouse=True)
async def engine(chat):
    """An engine that says what `says` holds, one text after the other, the last for ever."""

    def script(body):
        text = one.says[min(len(one.asked) - 1, len(one.says) - 1)]
        if isinstance(text, Reply):
            return text
        return Reply(tokens=chat.encode(text), text=text, finish=FinishReason.STOP)

    one = ScriptedEngine(script)
    one.says = ["hi there"]
    async with one.serving():
        yield one


@pytest_asyncio.fixture
async def elsewhere(folder, settings, tmp_path, engine):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    settings.REPLICA_TOKEN_DIR = tmp_path
    return await sync_to_async(played_elsewhere)(folder, tokens=tmp_path, engine_url=engine.url)


@pytest.fixture
def client(served, elsewhere):
    return openai.AsyncOpenAI(api_key=elsewhere.key, base_url=f"{served}/rollouts/v1", max_retries=0)


async def say(client, messages, **options):
    return await client.chat.completions.create(model="gpt-4o", messages=messages, **options)


async def trajectory_of(elsewhere, settings):
    calls = await sync_to_async(calls_of)(elsewhere.session.pk, open_store(settings.STORE_URL))
    made = assemble(task_id="t", calls=calls, sampling=SamplingParams())
    made.validate()
    return made


async def test_a_call_is_answered_and_its_tokens_are_kept(client, elsewhere, engine, chat, settings):
    answer = await say(client, ASK, temperature=0.1, top_p=0.5, max_tokens=7, seed=4, logprobs=True)
    (asked,) = engine.asked
    assert asked.prompt_token_ids == chat.render(ASK)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (1.0, 1.0, 0)
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (7, None)
    assert asked.min_version == str(elsewhere.run.lineage.head.ref)
    assert asked.exact_version is None
    call = await RolloutCall.objects.aget()
    assert answer.id == f"chatcmpl-{call.pk}"
    assert (call.number, call.sampled_tokens) == (0, 7)
    (segment,) = (await trajectory_of(elsewhere, settings)).segments
    sampled = chat.encode("hi there")[:7]
    assert segment.token_ids == [*chat.render(ASK), *sampled]
    assert segment.logprobs[-7:] == [TOP_LOGPROB] * 7
    assert [token.logprob for token in answer.choices[0].logprobs.content] == [TOP_LOGPROB] * 7
    assert not await Generation.objects.aexists()


async def test_a_conversation_goes_on_with_the_tokens_that_were_sampled(client, elsewhere, engine, chat, settings):
    sampled = [
        chat.token_strings.index("\ufffd"),
        *chat.encode("first"),
    ]  # part of a character: its text reads otherwise
    engine.says = [Reply(tokens=sampled, text="\ufffdfirst"), "second"]
    answer = await say(client, ASK)
    history = [*ASK, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert sampled[0] not in chat.render(history)
    await say(client, history)
    after = chat.continuation([{"role": "user", "content": "more"}], last_token=sampled[-1])
    assert engine.asked[1].prompt_token_ids == [*chat.render(ASK), *sampled, *after]
    trajectory = await trajectory_of(elsewhere, settings)
    assert len(trajectory.segments) == 1
    assert sum(trajectory.segments[0].loss_mask) == len(sampled) + len(chat.encode("second"))
    assert [m.content for m in trajectory.messages] == ["hello", "\ufffdfirst", "more", "second"]


async def test_a_rewritten_history_begins_a_segment_of_its_own(client, elsewhere, engine, settings, chat):
    engine.says = ["first", "second"]
    await say(client, ASK)
    rewritten = [*ASK, {"role": "assistant", "content": "First!"}, {"role": "user", "content": "more"}]
    await say(client, rewritten)
    assert engine.asked[1].prompt_token_ids == chat.render(rewritten)
    trajectory = await trajectory_of(elsewhere, settings)
    masks = [sum(segment.loss_mask) for segment in trajectory.segments]
    assert masks == [len(chat.encode("first")), len(chat.encode("second"))]


async def test_parallel_branches_train_nothing_twice(client, elsewhere, engine, settings, chat):
    engine.says = ["first", "left!", "right"]
    answer = await say(client, ASK)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    for word in ("left", "right"):
        await say(client, [*ASK, said, {"role": "user", "content": word}])
    trajectory = await trajectory_of(elsewhere, settings)
    lengths = [len(chat.encode(text)) for text in ("first", "left!", "right")]
    assert [sum(segment.loss_mask) for segment in trajectory.segments] == [lengths[0] + lengths[1], lengths[2]]


async def test_tools_are_called_and_answered_token_by_token(client, elsewhere, engine, chat, settings):
    engine.says = ['<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>', "done"]
    answer = await say(client, ASK, tools=TOOLS)
    (called,) = answer.choices[0].message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("look", {"where": "here"})
    message = answer.choices[0].message.model_dump()
    message["tool_calls"][0]["function"]["arguments"] = '{ "where" : "here" }'  # spelled anew by the harness
    history = [*ASK, message, {"role": "tool", "tool_call_id": called.id, "content": "nothing"}]
    await say(client, history, tools=TOOLS)
    assert engine.asked[1].prompt_token_ids[: len(engine.asked[0].prompt_token_ids)] == engine.asked[0].prompt_token_ids
    trajectory = await trajectory_of(elsewhere, settings)
    assert len(trajectory.segments) == 1
    assert [(call.tool, call.result, call.ok) for call in trajectory.tool_calls] == [("look", "nothing", True)]


async def test_other_tools_make_another_context(client, elsewhere, engine, settings):
    engine.says = ["first", "second"]
    answer = await say(client, ASK, tools=TOOLS)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    await say(client, [*ASK, said, {"role": "user", "content": "more"}])
    assert len((await trajectory_of(elsewhere, settings)).segments) == 2


async def test_a_stream_says_and_keeps_the_same(client, elsewhere, engine, chat, settings):
    stream = await say(client, ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hi there"
    assert chunks[-1].usage.completion_tokens == len(chat.encode("hi there"))
    history = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    await say(client, history)
    assert len((await trajectory_of(elsewhere, settings)).segments) == 1


@pytest.mark.parametrize("headers", [{"X-Stainless-Retry-Count": "1"}, {"Idempotency-Key": "k"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_gets_the_same_answer_and_counts_once(client, engine, headers, stream, elsewhere):
    engine.says = ["first", "second"]
    first = await say(client, ASK, extra_headers={**headers, "X-Stainless-Retry-Count": "0"}, stream=stream)
    told = "".join([chunk.choices[0].delta.content or "" async for chunk in first]) if stream else None
    again = await say(client, ASK, extra_headers=headers, stream=stream)
    if stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in again]) == told == "first"
    else:
        assert (again.id, again.choices[0].message) == (first.id, first.choices[0].message)
    assert len(engine.asked) == 1
    assert await RolloutCall.objects.acount() == 1


async def test_the_same_messages_without_a_mark_are_another_sample(client, engine, elsewhere):
    engine.says = ["first", "second"]
    answers = [(await say(client, ASK)).choices[0].message.content for _ in range(2)]
    assert answers == ["first", "second"]
    assert await RolloutCall.objects.acount() == 2


async def test_a_mark_of_another_request_is_refused(client, engine, elsewhere):
    await say(client, ASK, extra_headers={"Idempotency-Key": "k"})
    with pytest.raises(openai.ConflictError):
        await say(client, [{"role": "user", "content": "other"}], extra_headers={"Idempotency-Key": "k"})


async def test_two_repeats_at_once_count_once(client, engine, chat, elsewhere):
    engine.says = [Reply(tokens=chat.encode("slow"), text="slow", token_s=0.1)]
    marked = {"Idempotency-Key": "k"}
    told = await asyncio.gather(*(say(client, ASK, extra_headers=marked) for _ in range(2)), return_exceptions=True)
    assert sum(isinstance(one, openai.ConflictError) for one in told) == 1
    assert await RolloutCall.objects.acount() == 1
    again = await say(client, ASK, extra_headers=marked)
    assert again.id in {one.id for one in told if not isinstance(one, Exception)}


async def test_an_answer_that_broke_off_was_never_said(client, engine, chat, elsewhere):
    engine.says = [Reply(tokens=chat.encode("broken"), breaks_after=2), "whole"]
    with pytest.raises(openai.InternalServerError) as caught:
        await say(client, ASK)
    assert (caught.value.status_code, caught.value.code) == (503, "broken_off")
    assert not await RolloutCall.objects.aexists()
    answer = await say(client, ASK, extra_headers={"X-Stainless-Retry-Count": "1"})
    assert answer.choices[0].message.content == "whole"


async def test_openais_own_retries_find_what_was_lost(served, engine, elsewhere):
    """The answer is lost on its way; the library asks again by itself, and the tokens count once."""
    lost = []

    class Losing(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request):
            answer = await super().handle_async_request(request)
            await answer.aread()
            if not lost:
                lost.append(answer.json()["id"])
                raise httpx.ReadError("lost", request=request)
            return answer

    http = httpx.AsyncClient(transport=Losing())
    client = openai.AsyncOpenAI(
        api_key=elsewhere.key, base_url=f"{served}/rollouts/v1", max_retries=2, http_client=http
    )
    answer = await say(client, ASK)
    assert lost == [answer.id]
    assert await RolloutCall.objects.acount() == 1
    assert len(engine.asked) == 1


async def test_the_limits_of_the_rollout_hold(client, engine, elsewhere, settings):
    with pytest.raises(openai.BadRequestError) as caught:
        await say(client, [{"role": "user", "content": "x" * 1600}])
    assert caught.value.code == "context_length_exceeded"
    for _ in range(8):
        await say(client, ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        await say(client, ASK)
    assert caught.value.code == "turn_limit"
    assert len(engine.asked) == 8


async def test_calls_that_are_made_at_once_go_past_no_limit(client, engine, chat, elsewhere):
    engine.says = [Reply(tokens=chat.encode("slow"), text="slow", token_s=0.05)]
    told = await asyncio.gather(*(say(client, ASK) for _ in range(12)), return_exceptions=True)
    refused = [one for one in told if isinstance(one, Exception)]
    assert len(refused) == 4
    assert {getattr(one, "status_code", one) for one in refused} == {410}
    assert await RolloutCall.objects.acount() == 8


def test_sessions_take_no_place_of_users_and_none_takes_all_of_sessions(settings):
    gateway = Gateway()
    settings.GATEWAY_MAX_REQUESTS = SESSION_CALLS + 1
    one, other = uuid.uuid4(), uuid.uuid4()
    for _ in range(SESSION_CALLS):
        gateway.enter(one)
    with pytest.raises(OpenAiError) as caught:
        gateway.enter(one)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    gateway.enter(other)
    with pytest.raises(OpenAiError):
        gateway.enter(other)
    for _ in range(settings.GATEWAY_MAX_REQUESTS):
        gateway.enter()
    with pytest.raises(OpenAiError):
        gateway.enter()
    gateway.leave(one)
    gateway.enter(other)
    gateway.leave()
    gateway.enter()


@pytest.mark.parametrize(
    ("change", "param"),
    [({"n": 2}, "n"), ({"messages": []}, "messages"), ({"logit_bias": {"1": 1}}, "logit_bias")],
)
async def test_what_is_not_honoured_is_refused(client, elsewhere, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "policy", "messages": ASK, **change})
    assert caught.value.param == param


async def test_a_full_engine_asks_for_patience(client, engine, elsewhere):
    engine.says = [Reply(status=429, code="engine_busy")]
    with pytest.raises(openai.RateLimitError) as caught:
        await say(client, ASK)
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_the_models_are_one(client, elsewhere):
    assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_lanes_key_is_no_key_here_and_a_sessions_none_there(client, served, elsewhere):
    from controlplane.services.tenancy import api_key_create
    from tests.domain_factories import TESTER

    making = sync_to_async(api_key_create)
    _, lanes = await making(project=elsewhere.run.project, name="k", scopes=[Scope.GATEWAY], actor=TESTER)
    for key, base in ((lanes, "rollouts/v1"), (elsewhere.key, "v1"), ("slwr_nothing", "rollouts/v1")):
        other = openai.AsyncOpenAI(api_key=key, base_url=f"{served}/{base}", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await say(other, ASK)


ENDS = {
    "given up": lambda one: rollout_session_end(session_id=one.session.pk, reason="over"),
    "past its time": lambda one: age(one.session, seconds=601),
    "its group is dropped": lambda one: RolloutGroup.objects.filter(pk=one.group.pk).update(state=GroupState.DROPPED),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_key_dies_with_its_session(client, elsewhere, end):
    await say(client, ASK)
    await sync_to_async(end)(elsewhere)
    await asyncio.sleep(1.1)
    with pytest.raises(openai.AuthenticationError):
        await say(client, ASK)


async def test_what_is_under_way_when_the_session_ends_is_not_kept(client, engine, chat, elsewhere, monkeypatch):
    began, over = asyncio.Event(), asyncio.Event()

    async def hold_after_the_first(seconds, reader):
        if began.is_set():
            await over.wait()
        began.set()

    monkeypatch.setattr("benchmarks.scripted_engine._pause", hold_after_the_first)
    engine.says = [Reply(tokens=chat.encode("slow words"), text="slow words")]
    under_way = asyncio.create_task(say(client, ASK))
    await began.wait()
    await sync_to_async(rollout_session_end)(session_id=elsewhere.session.pk, reason="over")
    over.set()
    with pytest.raises(openai.APIStatusError) as caught:
        await under_way
    assert caught.value.status_code == 410
    assert not await RolloutCall.objects.aexists()


async def test_the_key_is_kept_nowhere(client, elsewhere, settings, tmp_path, caplog):
    await say(client, ASK)
    rows = [str(vars(row)) async for row in RolloutSession.objects.all()]
    rows += [str(vars(row)) async for row in RolloutCall.objects.all()]
    rows += [str(row.data) async for row in Event.objects.all()]
    blobs = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert rows
    assert blobs
    assert all(elsewhere.key not in row for row in rows)
    assert all(elsewhere.key.encode() not in blob for blob in blobs)
    assert elsewhere.key not in caplog.text


def result_of(elsewhere, *, secret=SECRET, **told):
    message = {
        "version": 1,
        "type": "session.result",
        "session": str(elsewhere.session.pk),
        "result": {"reward": 0.75},
        **told,
    }
    body = json.dumps(message).encode()
    return body, {"content-type": "application/json", **signing.sign(secret, body)}


async def report(served, elsewhere, **told):
    body, headers = result_of(elsewhere, **told)
    async with httpx.AsyncClient() as http:
        return await http.post(
            f"{served}/rollouts/v1/sessions/{elsewhere.session.pk}/result", content=body, headers=headers
        )


async def test_a_result_ends_the_session_and_its_key(served, client, elsewhere):
    answer = await report(served, elsewhere)
    assert (answer.status_code, answer.json()) == (200, {"version": 1, "duplicate": False})
    session = await RolloutSession.objects.aget()
    assert session.result["reward"] == 0.75
    assert session.ended_at is not None
    await asyncio.sleep(1.1)
    with pytest.raises(openai.AuthenticationError):
        await say(client, ASK)
    assert (await report(served, elsewhere)).json()["duplicate"] is True
    assert (await report(served, elsewhere, result={"reward": 0.5})).status_code == 409


BAD_REPORTS = {
    "another secret": ({"secret": "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="}, 401),
    "another session": ({"session": "s"}, 422),
    "another version": ({"version": 2}, 422),
    "another type": ({"type": "session.status"}, 422),
    "a reward over one": ({"result": {"reward": 1.5}}, 422),
    "no reward": ({"result": {}}, 422),
    "too much": ({"x": "x" * 70_000}, 413),
}


@pytest.mark.parametrize(("told", "status"), BAD_REPORTS.values(), ids=BAD_REPORTS)
async def test_a_bad_result_changes_nothing(served, elsewhere, told, status):
    assert (await report(served, elsewhere, **told)).status_code == status
    assert not await RolloutSession.objects.filter(ended_at__isnull=False).aexists()


async def test_the_sessions_key_does_not_report(served, elsewhere):
    body, _ = result_of(elsewhere)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {elsewhere.key}"}) as http:
        answer = await http.post(f"{served}/rollouts/v1/sessions/{elsewhere.session.pk}/result", content=body)
    assert answer.status_code == 401


async def test_a_result_of_a_session_that_was_given_up_is_refused(served, elsewhere):
    await sync_to_async(rollout_session_end)(session_id=elsewhere.session.pk, reason="too late")
    assert (await report(served, elsewhere)).status_code == 410
