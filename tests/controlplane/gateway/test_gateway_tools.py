"""Tools: offered to the model in its prompt, called in its answer, and counted when it calls them wrongly.

A script says what the model would: a tiny random model calls no tools. Tokens, template and gateway are real.
"""

import json

import openai
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from benchmarks.scripted_engine import Reply, ScriptedEngine
from controlplane.models import Generation
from rl_core.chat import ChatTokenizer
from rl_core.store import open_store
from rl_core.tool_calls import CLOSE
from rl_core.types import Trajectory
from tests.controlplane.gateway.gateway_rig import generation_of

pytestmark = pytest.mark.django_db(transaction=True)

TRAIN = {"X-Slipway-User": "user-1", "X-Slipway-Consent": "train"}
MESSAGES = [{"role": "user", "content": "Is it raining in Oslo?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "edit_file"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Says:
    """An engine that says one text, by the real tokenizer."""

    def __init__(self, folder):
        self.tokenizer = ChatTokenizer.load(folder)
        self.text = ""
        self.engine = ScriptedEngine(self.reply)

    def reply(self, body):
        return Reply(tokens=self.tokenizer.encode(self.text), text=self.text)

    @property
    def prompt(self):
        """What the last request's prompt reads."""
        return self.tokenizer.decode(self.engine.asked[-1].prompt_token_ids, skip_special_tokens=False)


@pytest_asyncio.fixture
async def says(bare, folder):
    made = Says(folder)
    async with made.engine.serving():
        await sync_to_async(bare.place)(made.engine.url)
        yield made


async def ask(client, **changes):
    options = {"model": "assistant", "messages": MESSAGES, "tools": TOOLS, "extra_headers": TRAIN, **changes}
    return await client.chat.completions.create(**options)


async def collected(stream):
    """A stream put together as a client would: content, calls, finish reason, id."""
    content, calls, reason, identity = "", {}, None, None
    async for chunk in stream:
        identity = chunk.id
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                assert call.index not in calls
                calls[call.index] = (call.id, call.type, call.function.name, call.function.arguments)
    return content, list(calls.values()), reason, identity


async def test_a_call_is_parsed_and_the_tools_are_described(client, says):
    says.text = f"Let me look.\n{CALL}"
    answer = await ask(client)
    message = answer.choices[0].message
    assert message.content == "Let me look."
    assert [(call.type, call.function.name) for call in message.tool_calls] == [("function", "weather")]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert '"name":"weather"' in says.prompt
    assert says.prompt.startswith("<|im_start|>system\nBe short.\n\n")
    row = await generation_of(answer)
    assert (row.behaviour["tool_calls"], row.behaviour["invalid_tool_calls"]) == (1, 0)
    assert row.trainable


async def test_a_stream_gives_calls_whole_and_text_as_it_comes(client, says):
    says.text = f"Let me look.\n{CALL}\n{CALL}"
    content, calls, reason, identity = await collected(await ask(client, stream=True))
    assert content == "Let me look."
    assert [call[2:] for call in calls] == [("weather", '{"city":"Oslo"}')] * 2
    assert len({call[0] for call in calls}) == 2
    assert reason == "tool_calls"
    row = await Generation.objects.aget(id=identity[-36:])
    assert row.behaviour["tool_calls"] == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"</tool_call>',
        '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
        "<tool_call>weather(Oslo)</tool_call>",
        '<tool_call>\n{"name": "weather", "argu',
    ],
)
async def test_a_malformed_call_is_given_as_text_counted_and_recorded(client, says, settings, call, stream):
    says.text = f"I call: {call}"
    answer = await ask(client, stream=stream)
    if stream:
        content, calls, reason, identity = await collected(answer)
    else:
        content, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls or []
        reason, identity = answer.choices[0].finish_reason, answer.id
    assert (content, calls, reason) == (says.text, [], "stop")
    row = await Generation.objects.aget(id=identity[-36:])
    assert (row.behaviour["tool_calls"], row.behaviour["invalid_tool_calls"]) == (1, 1)
    assert row.trainable
    trajectory = Trajectory.from_bytes(open_store(settings.STORE_URL).get_blob(row.content_key))
    assert trajectory.messages[-1].content == says.text
    assert [(one.ok, one.arguments) for one in trajectory.tool_calls] == [(False, call)]


async def test_a_call_without_a_required_argument_reaches_the_product_and_is_counted(client, says):
    says.text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    answer = await ask(client)
    assert answer.choices[0].message.tool_calls[0].function.arguments == "{}"
    assert answer.choices[0].message.content is None
    assert (await generation_of(answer)).behaviour["invalid_tool_calls"] == 1


async def test_edits_are_counted(client, says):
    says.text = '<tool_call>{"name": "edit_file", "arguments": {"path": "x"}}</tool_call>'
    assert (await generation_of(await ask(client))).behaviour["edits"] == 1


async def test_results_of_tools_go_back_into_the_conversation(client, says):
    says.text = CALL
    first = (await ask(client)).choices[0].message
    says.text = "It is raining."
    history = [*MESSAGES, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain<|im_end|>"}]
    answer = await ask(client, messages=history)
    assert answer.choices[0].message.content == "It is raining."
    assert '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call><|im_end|>' in says.prompt
    assert "<|im_start|>tool\nrain<\u200b|im_end|><|im_end|>" in says.prompt
    assert (await generation_of(answer)).behaviour["tool_calls"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_can_be_required(client, says, settings, stream):
    """The model is made to begin one: what it is made to say is prompt, not sampled."""
    says.text = '{"city": "Oslo"}}\n</tool_call>'
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await ask(client, tool_choice=choice, stream=stream)
    opening = '<tool_call>\n{"name": "weather", "arguments": '
    assert says.prompt.endswith(f"<|im_start|>assistant\n{opening}")
    assert CLOSE in says.engine.asked[-1].sampling.stop
    if stream:
        _, calls, reason, identity = await collected(answer)
        assert [call[2:] for call in calls] == [("weather", '{"city":"Oslo"}')]
    else:
        identity, reason = answer.id, answer.choices[0].finish_reason
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert reason == "tool_calls"
    row = await Generation.objects.aget(id=identity[-36:])
    assert row.sampled_tokens == len(says.tokenizer.encode(says.text))
    says.text = 'weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert (await ask(client, tool_choice="required")).choices[0].message.tool_calls[0].function.name == "weather"


async def test_no_tools_no_calls(client, says):
    says.text = f"Text. {CALL}"
    for options in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        answer = await ask(client, **options)
        assert answer.choices[0].message.content == says.text
        assert answer.choices[0].message.tool_calls is None
        assert "weather" not in says.prompt


async def test_one_call_at_a_time_stops_after_the_first(client, says):
    says.text = CALL
    await ask(client, parallel_tool_calls=False, stop=["x"])
    assert says.engine.asked[-1].sampling.stop == ("x", CLOSE)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages"),
    ],
)
async def test_bad_tools_are_refused_by_name(client, says, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **change)
    assert caught.value.param == param
