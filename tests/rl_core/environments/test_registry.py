"""The contract that every environment must keep. A new row of the registry is tested by being there."""

import re

import msgspec
import pytest

from rl_core.chat import ChatTokenizer
from rl_core.environments.harness import Harness
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.reward import combine, grade, parse_rubric
from rl_core.environments.session import SeedKey
from rl_core.environments.tasks import parse_task_set
from rl_core.environments.tool_syntax import Call
from rl_core.errors import SandboxRefused
from rl_core.types import Ending, Role, Split
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.factories import ScriptedPolicy

every_environment = pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer.load(chat_folder(tmp_path_factory.mktemp("chat")))


@every_environment
def test_it_is_named_and_described(environment):
    assert ENVIRONMENTS[environment.slug] is environment
    assert re.fullmatch(r"[a-z0-9-]+", environment.slug)
    assert environment.title
    assert environment.description.endswith(".")
    assert environment.sampling.trainable
    assert parse_rubric(environment.rubric.to_json()) == environment.rubric


@every_environment
def test_its_task_set_validates_and_is_the_same_every_time(environment):
    tasks = environment.build_task_set()
    assert parse_task_set(tasks.to_jsonl()) == tasks
    assert environment.build_task_set().content_hash == tasks.content_hash
    assert len(tasks.split(Split.TRAIN)) >= 24
    assert len(tasks.split(Split.HELDOUT)) >= 12


@every_environment
def test_the_prompt_shows_no_answer(environment):
    for task in environment.build_task_set().tasks:
        opening = environment.messages(task)
        assert opening[-1].role is Role.USER
        assert all(message.segment == -1 for message in opening)
        shown = opening[-1].content
        assert all(turn not in shown for turn in environment.demonstration(task))


@every_environment
def test_it_refuses_to_open_without_the_sandbox_it_needs(environment):
    if environment.needs_sandbox:
        with pytest.raises(SandboxRefused, match="sandboxd"):
            environment.open_world(None)
    else:
        environment.open_world(None)


async def reward_of(environment, chat, task, turns, sandbox):
    harness = Harness(environment, chat)
    limits = msgspec.structs.replace(environment.limits, max_context_tokens=32_000)
    sampling = environment.sampling
    session = harness.start(
        task, sampling=type(sampling)(max_tokens=8000), limits=limits, seed=SeedKey(run_seed=0, group="g", attempt=0)
    )
    policy = ScriptedPolicy(chat, turns)
    world = environment.open_world(sandbox if environment.needs_sandbox else None)
    while not session.done:
        await harness.step(session, policy=policy, world=world)
    session.trajectory.validate()
    scores = await grade(environment.rubric, task=task, trajectory=session.trajectory, sandbox=sandbox)
    return combine(environment.rubric, scores), session.trajectory.ending


@every_environment
async def test_its_demonstrations_earn_everything_and_silence_nothing(environment, chat, request):
    sandbox = request.getfixturevalue("sandbox") if environment.needs_sandbox else None
    tasks = environment.build_task_set()
    solvable = {split: [t for t in tasks.split(split) if not t.reference.get("impossible")] for split in Split}
    sample = [*solvable[Split.TRAIN][::90], *solvable[Split.HELDOUT][::10]]
    for task in sample:
        perfect = await reward_of(environment, chat, task, environment.demonstration(task), sandbox)
        assert perfect == (1.0, Ending.TERMINATED)
    assert await reward_of(environment, chat, sample[0], [""], sandbox) == (0.0, Ending.TERMINATED)
    evasive, _ = await reward_of(environment, chat, sample[0], ["I do not know."], sandbox)
    assert evasive < 1.0 if not environment.tools else evasive == 0.0


@every_environment
async def test_its_impossible_tasks_pay_no_honest_attempt(environment, chat, request):
    impossible = [task for task in environment.build_task_set().tasks if task.reference.get("impossible")]
    for task in impossible:
        assert task.reference["why"]
        sandbox = request.getfixturevalue("sandbox")
        assert await reward_of(environment, chat, task, environment.demonstration(task) * 9, sandbox) == (
            0.0, Ending.TRUNCATED,
        )  # fmt: skip


@every_environment
def test_its_examples_speak_its_own_tool_syntax(environment):
    if not environment.tools:
        assert environment.max_turns == 1
        return
    opening = environment.messages(environment.build_task_set().tasks[0])
    calls = [environment.find_calls(m.content) for m in opening if m.role is Role.ASSISTANT]
    assert sum(len(found) == 1 and isinstance(found[0], Call) for found in calls) >= 2
    assert all(isinstance(call, Call) for found in calls for call in found)
    assert sum(m.role is environment.tool_role for m in opening) >= 2
