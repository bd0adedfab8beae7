"""The world of a repository: files as data, commands in a real sandbox over the same files, and what graders get."""

import asyncio
import dataclasses

import msgspec
import pytest

from rl_core.chat import ChatTokenizer
from rl_core.environments.environment import Environment
from rl_core.environments.harness import Harness
from rl_core.environments.patch import PATCH, exported_patch
from rl_core.environments.repository.tools import REPOSITORY_TOOLS
from rl_core.environments.repository.tree import MAX_LAYER_BYTES
from rl_core.environments.repository.world import (
    COMMAND_LIMITS,
    DIFF,
    NO_ANSWER,
    QUESTIONS,
    RepositoryState,
    RepositoryWorld,
)
from rl_core.environments.session import SeedKey, Session
from rl_core.environments.tasks import Task
from rl_core.environments.tool_syntax import JSON_SYNTAX
from rl_core.environments.word_problems import ENVIRONMENT
from rl_core.errors import TaskSetError, WorldError
from rl_core.sandbox.protocol import MIB, SnapshotMissing
from rl_core.session_specs import Limits
from rl_core.tool_calls import call_text
from rl_core.types import Ending, Message, Role, SamplingParams, Split
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.factories import ScriptedPolicy

FILES = {
    "shop/price.py": "def total(prices):\n    return sum(prices) - 1\n",
    "test_price.py": "from shop.price import total\nassert total([1, 2]) == 3, total([1, 2])\nprint('fine')\n",
}
TASK = Task(
    id="t",
    split=Split.TRAIN,
    input={"files": FILES},
    reference={"answers": [{"words": ["currency", "euro"], "text": "Euros."}]},
)
REPAIR: Environment = dataclasses.replace(
    ENVIRONMENT,
    messages=lambda task: [Message(role=Role.USER, content="Repair the shop.")],
    tools=REPOSITORY_TOOLS,
    syntax=JSON_SYNTAX,
)


async def one(world, tool, *, task=TASK, state=None, **arguments):
    state = await world.open(task=task, key="k") if state is None else state
    return await world.call(task=task, tool=tool, arguments=arguments, state=state, step="s")


async def run(sandbox, command, *, files=FILES, **arguments):
    world = RepositoryWorld(sandbox)
    task = msgspec.structs.replace(TASK, input={"files": files})
    return await one(world, "run", task=task, command=command, **arguments)


async def test_files_are_edited_without_a_sandbox_and_the_task_stays_as_it_was():
    world = RepositoryWorld(None)
    edited = await one(world, "edit", path="shop/price.py", old=" - 1", new="")
    assert (edited.ok, edited.text) == (True, "edited shop/price.py at line 2")
    read = await one(world, "read", state=edited.state, path="shop/price.py")
    assert read.text.endswith("2\t    return sum(prices)")
    assert read.state is None
    assert "- 1" in (await one(world, "read", path="shop/price.py")).text


async def test_what_the_policy_does_wrong_is_told_and_changes_nothing():
    wrong = await one(RepositoryWorld(None), "edit", path="/etc/passwd", old="a", new="b")
    assert (wrong.ok, wrong.state) == (False, None)
    assert wrong.text.startswith("Error: '/etc/passwd' is no path here")


async def test_graders_get_the_changes_as_data():
    world = RepositoryWorld(None)
    state = (await one(world, "edit", path="shop/price.py", old=" - 1", new="")).state
    state = (await one(world, "write", state=state, path="notes/é.txt", content="ok")).state
    state = (await one(world, "ask", state=state, question="Which currency?")).state
    artifacts = await world.export(task=TASK, state=state)
    fixed = FILES["shop/price.py"].replace(" - 1", "")
    assert exported_patch(artifacts) == {"shop/price.py": fixed.encode(), "notes/é.txt": b"ok"}
    assert "-    return sum(prices) - 1\n+    return sum(prices)\n" in artifacts[DIFF]
    assert artifacts[QUESTIONS] == "1"
    assert (await world.export(task=TASK, state=await world.open(task=TASK, key="k")))[PATCH] == "{}"


@pytest.mark.parametrize(
    ("question", "answer"), [("In Euro or in cents?", "Euros."), ("Which CURRENCY?", "Euros."), ("Why?", NO_ANSWER)]
)
async def test_the_user_answers_what_the_task_has_an_answer_to(question, answer):
    asked = await one(RepositoryWorld(None), "ask", question=question)
    assert (asked.ok, asked.text) == (True, answer)


async def test_submitting_ends():
    assert (await one(RepositoryWorld(None), "submit")).solved


async def test_long_answers_keep_their_head_and_their_tail():
    world = RepositoryWorld(None, max_result_chars=90)
    task = msgspec.structs.replace(TASK, input={"files": {"f": "head\n" + "x" * 300 + "\ntail"}})
    text = (await one(world, "read", task=task, path="f")).text
    assert text.startswith("1\thead")
    assert text.endswith("3\ttail")
    assert "characters left out" in text
    assert len(text) < 150


@pytest.mark.parametrize(
    "change",
    [
        {"input": {"file": {}}},
        {"input": {"files": {"a": 1}}},
        {"input": {"files": {"../a": ""}}},
        {"input": {"files": {"a": "", "a/b": ""}}},
    ],
)
async def test_a_task_without_proper_files_is_the_task_sets_fault(change):
    with pytest.raises(TaskSetError, match="task t"):
        await RepositoryWorld(None).open(task=msgspec.structs.replace(TASK, **change), key="k")


async def test_a_task_with_answers_that_are_none_is_the_task_sets_fault():
    task = msgspec.structs.replace(TASK, reference={"answers": ["yes"]})
    with pytest.raises(TaskSetError, match="answers"):
        await one(RepositoryWorld(None), "ask", task=task, question="?")


async def test_bytes_that_are_no_state_are_refused():
    with pytest.raises(WorldError, match="state"):
        await one(RepositoryWorld(None), "read", state=b"\xff", path="a")


async def test_a_command_runs_over_the_edited_files_and_what_it_writes_stays(sandbox):
    world = RepositoryWorld(sandbox)
    failed = await one(world, "run", command="python3 test_price.py")
    assert failed.ok
    assert failed.text.endswith("AssertionError: 2\n(exit code 1)")
    state = (await one(world, "edit", path="shop/price.py", old=" - 1", new="")).state
    passed = await one(world, "run", state=state, command="python3 test_price.py")
    assert passed.text == "fine\n(exit code 0)"
    wrote = await one(
        world, "run", state=passed.state, command="python3 -c \"open('made.txt', 'w').write('by the command')\""
    )
    assert (await one(world, "read", state=wrote.state, path="made.txt")).text == "1\tby the command"
    changed = exported_patch(await world.export(task=TASK, state=wrote.state))
    assert {path for path in changed if "__pycache__" not in path} == {"shop/price.py", "made.txt"}


@pytest.mark.parametrize("command", ["", "   ", "python3 'x", "x" * 5000, "a\0b"])
async def test_what_is_no_command_is_refused_unrun(command):
    class Never:
        async def run(self, argv, **options):
            raise AssertionError(argv)

    refused = await one(RepositoryWorld(Never()), "run", command=command)
    assert (refused.ok, refused.state) == (False, None)
    assert "the command" in refused.text


async def test_an_environment_that_offers_commands_needs_a_sandbox():
    with pytest.raises(WorldError, match="without a sandbox"):
        await one(RepositoryWorld(None), "run", command="python3")


async def test_what_commands_do_wrong_is_told(sandbox):
    slow, none, gigabyte = await asyncio.gather(
        run(sandbox, "python3 -c 'while True: pass'", timeout_s=0.5),
        run(sandbox, "no-such-program"),
        run(sandbox, "python3 -c \"import sys\nfor _ in range(1024): sys.stdout.write('x' * 1048576)\""),
    )
    assert not slow.ok
    assert slow.text.startswith("(stopped: it ran longer than 0.5 s)\n(what it did to the files was not kept")
    assert "no-such-program" in none.text
    assert not gigabyte.ok
    assert f"wrote more than {COMMAND_LIMITS.output_bytes} bytes" in gigabyte.text
    assert len(gigabyte.text) < 9000


async def test_what_a_command_leaves_that_is_no_layer_is_not_kept(sandbox):
    link = await run(sandbox, "python3 -c \"import os; os.symlink('/etc/passwd', 'link'); print('done')\"")
    assert "done" in link.text
    assert "was not kept" in link.text
    assert msgspec.msgpack.decode(link.state, type=RepositoryState).layer == {}
    big = await run(sandbox, f"python3 -c \"open('big', 'wb').write(b'x' * {MAX_LAYER_BYTES + 1})\"")
    assert "was not kept" in big.text


async def test_files_that_do_not_fit_the_sandbox_are_told_if_the_policy_wrote_them(sandbox):
    """Else it could end its group, all of whose attempts are then not trained on."""
    small = msgspec.structs.replace(COMMAND_LIMITS, disk_bytes=64 * 1024)
    world = RepositoryWorld(sandbox, limits=small)
    task = msgspec.structs.replace(TASK, input={"files": {"a.txt": "a" * 50_000}})
    assert (await one(world, "run", task=task, command="true")).ok
    state = (await one(world, "write", task=task, path="b.txt", content="b" * 50_000)).state
    result = await one(world, "run", task=task, state=state, command="true")
    assert (result.ok, result.state) == (False, None)
    assert "do not fit" in result.text
    huge = msgspec.structs.replace(TASK, input={"files": {"a.txt": "a" * 100_000}})
    with pytest.raises(TaskSetError, match="do not fit"):
        await one(world, "run", task=huge, command="true")


async def test_a_snapshot_that_is_gone_is_frozen_again(sandbox):
    class Forgetful:
        def __init__(self):
            self.frozen = []

        async def freeze(self, tree):
            self.frozen.append(await sandbox.freeze(tree))
            return self.frozen[-1]

        async def run(self, argv, **options):
            if len(self.frozen) == 1:
                raise SnapshotMissing("gone")
            return await sandbox.run(argv, **options)

    forgetful = Forgetful()
    world = RepositoryWorld(forgetful)
    with pytest.raises(WorldError):
        await one(world, "run", command="python3 -c 1")
    assert (await one(world, "run", command="python3 -c 1")).text == "(exit code 0)"
    assert len(forgetful.frozen) == 2


async def test_a_whole_session(sandbox, tmp_path):
    chat = ChatTokenizer.load(chat_folder(tmp_path))
    harness = Harness(REPAIR, chat)
    turns = [
        call_text("list", "{}") + call_text("read", '{"path": "shop/price.py"}'),
        call_text("edit", '{"path": "shop/price.py", "old": " - 1", "new": ""}'),
        call_text("run", '{"command": "python3 test_price.py", "wait": true}'),
        call_text("run", '{"command": "python3 test_price.py"}'),
        call_text("submit", '{"summary": "done"}'),
    ]
    limits = Limits(max_turns=9, max_context_tokens=32_000, max_parallel_calls=4)
    seed = SeedKey(run_seed=0, group="g", attempt=0)
    session = harness.start(TASK, sampling=SamplingParams(max_tokens=900), limits=limits, seed=seed)
    policy, world = ScriptedPolicy(chat, turns), RepositoryWorld(sandbox)
    while not session.done:
        await harness.step(session, policy=policy, world=world)
        session = Session.from_bytes(session.to_bytes())
    trajectory = session.trajectory
    assert trajectory.ending is Ending.TERMINATED
    assert [call.ok for call in trajectory.tool_calls] == [True, True, True, False, True, True]
    assert "'wait' was unexpected" in trajectory.tool_calls[3].result
    assert trajectory.tool_calls[4].result == "fine\n(exit code 0)"
    assert b"- 1" not in exported_patch(trajectory.artifacts)["shop/price.py"]


def test_the_limits_of_a_command_are_those_of_the_tree():
    assert COMMAND_LIMITS.layer_bytes == MAX_LAYER_BYTES < COMMAND_LIMITS.disk_bytes == 64 * MIB
