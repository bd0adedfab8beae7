"""A world's state is a value that sessions carry: opened once, handed from call to call, exported at the end."""

import asyncio
import dataclasses
import json

import pytest

from rl_core.chat import ChatTokenizer
from rl_core.environments.harness import Harness
from rl_core.environments.session import SeedKey, Session
from rl_core.environments.tool_syntax import JSON_SYNTAX, Tool
from rl_core.environments.word_problems import ENVIRONMENT
from rl_core.environments.world import ToolResult
from rl_core.errors import EngineUnreachable, WorldError
from rl_core.session_specs import Limits
from rl_core.tool_calls import call_text
from rl_core.types import Ending, Role, SamplingParams
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.factories import ScriptedPolicy, a_task

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOTEBOOK = dataclasses.replace(
    ENVIRONMENT,
    tools=(
        Tool(name="add", description="Add a word.", parameters=WORD),
        Tool(name="all", description="All words.", parameters=NOTHING, read_only=True),
        Tool(name="finish", description="End.", parameters=NOTHING),
    ),
    syntax=JSON_SYNTAX,
)


class Notebook:
    """A world whose state is a list of words."""

    def __init__(self, *, fail=()):
        self.opened, self.steps, self.closed, self.fail = [], [], [], list(fail)
        self.reading = self.most_reading = 0

    async def open(self, *, task, key):
        self.opened.append(key)
        return b"[]"

    async def call(self, *, task, tool, arguments, state, step):
        self.steps.append(step)
        if self.fail:
            raise self.fail.pop()
        words = json.loads(state)
        if tool == "finish":
            return ToolResult(text="bye", ok=True, solved=True)
        if tool == "all":
            self.reading += 1
            self.most_reading = max(self.reading, self.most_reading)
            await asyncio.sleep(0)
            self.reading -= 1
            return ToolResult(text=" ".join(words), ok=True)
        return ToolResult(text="ok", ok=True, state=json.dumps([*words, arguments["word"]]).encode())

    async def export(self, *, task, state):
        return {"words": state.decode()}


def add(word):
    return call_text("add", json.dumps({"word": word}))


@pytest.fixture
def chat(tmp_path):
    return ChatTokenizer.load(chat_folder(tmp_path))


def begin(chat, **limits):
    limits = Limits(**{"max_turns": 9, "max_context_tokens": 9000, "max_parallel_calls": 4, **limits})
    harness = Harness(NOTEBOOK, chat)
    seed = SeedKey(run_seed=0, group="g", attempt=0)
    return harness, harness.start(a_task(), sampling=SamplingParams(max_tokens=900), limits=limits, seed=seed, key="k")


async def play(chat, turns, world, **limits):
    harness, session = begin(chat, **limits)
    policy = ScriptedPolicy(chat, turns)
    while not session.done:
        await harness.step(session, policy=policy, world=world)
        session = Session.from_bytes(session.to_bytes())
    return session, policy


async def test_the_state_goes_from_call_to_call_and_is_exported_at_the_end(chat):
    world = Notebook()
    session, policy = await play(chat, [add("a") + add("b"), add("c"), call_text("all", "{}"), "Done."], world)
    assert session.world_state == b'["a", "b", "c"]'
    assert [call.result for call in session.trajectory.tool_calls] == ["ok", "ok", "ok", "a b c"]
    assert session.trajectory.artifacts == {"words": '["a", "b", "c"]'}
    assert session.trajectory.ending is Ending.TERMINATED
    assert world.opened == ["k"]
    assert "a b c" in chat.decode(policy.prompts[3])


async def test_a_copied_session_is_a_copied_world(chat):
    world = Notebook()
    harness, session = begin(chat)
    await harness.step(session, policy=ScriptedPolicy(chat, [add("a")]), world=world)
    fork = Session.from_bytes(session.to_bytes())
    await harness.step(session, policy=ScriptedPolicy(chat, [add("b")]), world=world)
    await harness.step(fork, policy=ScriptedPolicy(chat, [add("c")]), world=world)
    assert (session.world_state, fork.world_state) == (b'["a", "b"]', b'["a", "c"]')


async def test_a_step_has_the_same_name_when_it_is_made_again_and_another_for_another_call(chat):
    world = Notebook(fail=[WorldError("gone")])
    harness, session = begin(chat)
    before = session.to_bytes()
    policy = ScriptedPolicy(chat, [add("a")] * 2)
    with pytest.raises(WorldError):
        await harness.step(session, policy=policy, world=world)
    assert session.to_bytes() == before
    await harness.step(session, policy=policy, world=world)
    assert world.opened == ["k", "k"]
    assert len(set(world.steps)) == 1
    others = [Session.from_bytes(before) for _ in range(2)]
    await harness.step(others[0], policy=ScriptedPolicy(chat, [add("z")]), world=world)
    await harness.step(others[1], policy=ScriptedPolicy(chat, [add("a") * 2]), world=world)
    await harness.step(session, policy=ScriptedPolicy(chat, [add("a")]), world=world)
    assert len(set(world.steps)) == 4
    assert len(world.steps) == 6


async def test_an_export_that_fails_leaves_the_last_turn_to_be_played_again(chat):
    class Stuck(Notebook):
        async def export(self, *, task, state):
            if self.fail:
                raise self.fail.pop()
            return await super().export(task=task, state=state)

    harness, session = begin(chat)
    world, before = Stuck(fail=[WorldError("gone")]), session.to_bytes()
    policy = ScriptedPolicy(chat, ["Done."] * 2)
    with pytest.raises(WorldError):
        await harness.step(session, policy=policy, world=world)
    assert session.to_bytes() == before
    await harness.step(session, policy=policy, world=world)
    assert session.trajectory.artifacts == {"words": "[]"}


async def test_the_world_is_opened_before_anything_is_sampled_and_not_at_all_without_room(chat):
    class Silent:
        async def generate(self, prompt_token_ids, sampling):
            raise EngineUnreachable("gone")

    world = Notebook()
    harness, session = begin(chat)
    with pytest.raises(EngineUnreachable):
        await harness.step(session, policy=Silent(), world=world)
    assert (world.opened, session.world_state) == (["k"], None)
    _, full = begin(chat, max_context_tokens=64)
    assert (full.done, full.world_state) == (True, None)


async def test_calls_that_only_read_run_side_by_side_and_see_what_was_written_before(chat):
    world = Notebook()
    read = call_text("all", "{}")
    session, _ = await play(chat, [read + read + add("a") + read, "Done."], world)
    assert [call.result for call in session.trajectory.tool_calls] == ["", "", "ok", "a"]
    assert world.most_reading == 2


async def test_all_results_of_a_turn_come_back_together_in_order(chat):
    session, _ = await play(chat, [add("a") + call_text("all", "{}"), "Done."], Notebook())
    results = [m for m in session.trajectory.messages if m.role is Role.TOOL and m.segment == 0]
    assert [(m.name, m.content) for m in results] == [("add", "ok"), ("all", "a")]
    assert len({(m.start, m.end) for m in results}) == 1
    start, end = results[0].start, results[0].end
    shown = chat.decode(session.trajectory.segments[0].token_ids[start:end])
    assert shown.index("ok") < shown.index("a\n")
    assert [m.parent for m in results] == [results[0].parent, session.trajectory.messages.index(results[0])]


async def test_calls_over_the_turns_bound_are_refused_one_by_one(chat):
    world = Notebook()
    session, _ = await play(chat, [add("a") * 3, "Done."], world, max_parallel_calls=2)
    assert [call.ok for call in session.trajectory.tool_calls] == [True, True, False]
    assert "2 calls" in session.trajectory.tool_calls[2].result
    assert session.world_state == b'["a", "a"]'


async def test_one_call_a_turn_stops_the_turn_where_the_call_ends(chat):
    _, one = begin(chat, max_parallel_calls=1)
    _, many = begin(chat)
    assert (one.sampling.stop, many.sampling.stop) == (("</tool_call>",), ())


async def test_what_ends_the_session_ends_the_turn_too(chat):
    finish = call_text("finish", "{}")
    session, _ = await play(chat, [add("a") + finish + add("b")], Notebook())
    assert session.trajectory.ending is Ending.TERMINATED
    assert [call.ok for call in session.trajectory.tool_calls] == [True, True, False]
    assert session.trajectory.artifacts == {"words": '["a"]'}
    assert [m.segment for m in session.trajectory.messages[-3:]] == [-1, -1, -1]


async def test_the_time_limit_counts_turns_and_truncates(chat):
    ticks = iter(range(0, 1000, 10))
    harness = Harness(NOTEBOOK, chat, clock=lambda: next(ticks))
    limits = Limits(max_turns=9, max_context_tokens=9000, max_wall_s=25.0)
    seed = SeedKey(run_seed=0, group="g", attempt=0)
    session = harness.start(a_task(), sampling=SamplingParams(max_tokens=900), limits=limits, seed=seed)
    policy = ScriptedPolicy(chat, [add("a")] * 5)
    while not session.done:
        await harness.step(session, policy=policy, world=Notebook())
    assert (session.turn, session.wall_s, session.trajectory.ending) == (3, 30.0, Ending.TRUNCATED)
