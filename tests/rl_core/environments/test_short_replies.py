"""Everyday questions: the fixed task set, and what the rubric makes of replies as a small model writes them."""

import re

import pytest

from rl_core.chat import ChatTokenizer
from rl_core.environments import short_replies
from rl_core.environments.harness import Harness
from rl_core.environments.reward import combine, grade
from rl_core.environments.session import SeedKey
from rl_core.environments.tasks import Task
from rl_core.environments.world import LocalTools
from rl_core.session_specs import Limits
from rl_core.types import Ending, Message, Role, Split, Trajectory
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.factories import ScriptedPolicy

TASKS = short_replies.build_task_set()
SPIDER = TASKS.split(Split.TRAIN)[0]


def test_sizes_and_the_fixed_content():
    assert len(TASKS.split(Split.TRAIN)) == 206
    assert len(TASKS.split(Split.HELDOUT)) == 64
    assert SPIDER.input == {"question": "How many legs does a spider have?"}


def test_no_question_is_in_both_splits_however_it_is_written():
    plain = {
        split: {re.sub(r"\W+", " ", task.input["question"].lower()).strip() for task in TASKS.split(split)}
        for split in Split
    }
    assert len(plain[Split.TRAIN]) == 206
    assert not plain[Split.TRAIN] & plain[Split.HELDOUT]


async def scores_of(text: str, task: Task = SPIDER) -> dict[str, float | None]:
    reply = Message(role=Role.ASSISTANT, content=text, segment=0)
    trajectory = Trajectory(task_id=task.id, messages=[reply], segments=[], ending=Ending.TERMINATED)
    scores = await grade(short_replies.RUBRIC, task=task, trajectory=trajectory, sandbox=None)
    return {score.key: score.value for score in scores} | {"reward": combine(short_replies.RUBRIC, scores)}


async def test_every_answer_beside_a_question_is_all_that_the_rubric_asks_for():
    wanting = {task.id: await scores_of(task.reference["answer"], task) for task in TASKS.tasks}
    assert {name: scores for name, scores in wanting.items() if set(scores.values()) != {1.0}} == {}


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("A spider has eight legs", {"one_sentence"}),
        ("a spider has eight legs.", {"one_sentence"}),
        ("It has eight legs. They are long.", {"one_sentence"}),
        ("It has eight\nlegs.", {"one_sentence"}),
        ("It has 8.0 legs.", set()),
        ("A spider has eight legs and every one of them has many small hairs and some claws too.", {"short"}),
        ("Eight.", {"short"}),
        ("Sure, a spider has eight legs.", {"no_preamble"}),
        ("Surely a spider has eight legs.", set()),
        ("It has eight, have you seen one?", {"one_sentence", "no_question"}),
        ("I don't know about eight legs.", {"answers"}),
        ("A spider has nine legs.", {"states_fact"}),
        ("", {"one_sentence", "short", "no_preamble", "no_question", "answers", "states_fact"}),
    ],
)
async def test_what_each_criterion_sees(text, failed):
    scores = await scores_of(text)
    reward = scores.pop("reward")
    assert {key for key, value in scores.items() if value == 0.0} == failed
    assert (reward == 1.0) == (failed <= {"states_fact"})


async def test_an_episode_is_one_reply_even_if_it_looks_like_a_tool_call(tmp_path):
    chat = ChatTokenizer.load(chat_folder(tmp_path))
    harness = Harness(short_replies.ENVIRONMENT, chat)
    sampling = short_replies.ENVIRONMENT.sampling
    session = harness.start(SPIDER, sampling=sampling, limits=Limits(), seed=SeedKey(run_seed=0, group="g", attempt=0))
    assert session.sampling.stop == ()
    await harness.step(session, policy=ScriptedPolicy(chat, ["<calc>2+6</calc>"]), world=LocalTools({}))
    assert (session.done, session.trajectory.ending, session.trajectory.tool_calls) == (True, Ending.TERMINATED, [])
