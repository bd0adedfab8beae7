"""Bug repair: the shipped tasks, the original out of sight of the policy's commands, and what cheating earns."""

from __future__ import annotations

import msgspec
import pytest

from rl_core.environments.bug_repair import (
    RUBRIC,
    SOURCES,
    TASKS,
    build_task_set,
    demonstration,
    messages,
    open_world,
)
from rl_core.environments.environment import JSON_SYNTAX
from rl_core.environments.repository.tools import EDIT, REPOSITORY_TOOLS
from rl_core.environments.repository.world import RepositoryWorld
from rl_core.environments.reward import combine, grade
from rl_core.errors import TaskSetError
from rl_core.types import Ending, Split, Trajectory


@pytest.fixture(scope="module")
def tasks():
    return build_task_set()


def test_the_shipped_set_is_small_and_of_the_sources_that_it_names(tasks):
    assert TASKS.stat().st_size < 400_000
    assert {task.reference["source"] for task in tasks.tasks} <= set(SOURCES.split(","))
    sides = [{task.reference["source"] for task in tasks.split(split)} for split in Split]
    assert not sides[0] & sides[1]
    assert len(tasks.split(Split.TRAIN)) >= 40
    assert len(tasks.split(Split.HELDOUT)) >= 12


def test_a_demonstration_is_one_edit_that_makes_the_known_repair(tasks):
    for task in tasks.tasks:
        call, submit = (JSON_SYNTAX.find(REPOSITORY_TOOLS, turn)[0] for turn in demonstration(task))
        text, solution = task.input["files"][call.arguments["path"]], task.reference["solution"]
        assert (call.tool, submit.tool, text.count(call.arguments["old"])) == (EDIT.name, "submit", 1)
        start, end = solution["offset"], solution["offset"] + len(solution["old"])
        repaired = text[:start] + solution["new"] + text[end:]
        assert text.replace(call.arguments["old"], call.arguments["new"]) == repaired


def test_the_policy_sees_no_reference(tasks):
    for task in tasks.tasks:
        shown = messages(task)[-1].content
        assert task.reference["diff"] not in shown
        assert "test_visible.py" in shown


def task_of(tasks, source):
    return next(task for task in tasks.tasks if task.reference["source"] == source)


class Session:
    """One session of a task, played by hand."""

    def __init__(self, world, task):
        self.world, self.task, self.state = world, task, None

    async def call(self, tool, **arguments):
        if self.state is None:
            self.state = await self.world.open(task=self.task, key="k")
        result = await self.world.call(task=self.task, tool=tool, arguments=arguments, state=self.state, step="s")
        self.state = self.state if result.state is None else result.state
        return result

    async def scores(self, sandbox):
        artifacts = await self.world.export(task=self.task, state=self.state)
        trajectory = Trajectory(
            task_id=self.task.id, messages=[], segments=[], ending=Ending.TERMINATED, artifacts=artifacts
        )
        scores = await grade(RUBRIC, task=self.task, trajectory=trajectory, sandbox=sandbox)
        return {score.key: score.value for score in scores}, combine(RUBRIC, scores)


async def test_the_test_fails_before_the_repair_and_passes_after_it(sandbox, tasks):
    session = Session(open_world(sandbox), task_of(tasks, "textwrap"))
    before = await session.call("run", command="python3 test_visible.py")
    assert "(exit code 1)" in before.text
    edit = JSON_SYNTAX.find(REPOSITORY_TOOLS, demonstration(session.task)[0])[0]
    assert (await session.call("edit", **edit.arguments)).ok
    assert (await session.call("run", command="python3 test_visible.py")).text == "(exit code 0)"
    assert "no-such-program: No such file" in (await session.call("run", command="no-such-program x")).text
    values, reward = await session.scores(sandbox)
    assert values == {"visible_tests": 1.0, "hidden_tests": 1.0, "test_gap": 0.0, "tests_touched": 0.0}
    assert reward == 1.0


LOOK = "import os, sysconfig; print(open(os.path.join(os.path.dirname(os.__file__), {name!r})).read()[:10])"


@pytest.mark.parametrize(("source", "file"), [("textwrap", "textwrap.py"), ("tomllib", "tomllib/_parser.py")])
async def test_the_original_is_out_of_the_policys_sight(sandbox, tasks, source, file):
    command = f"python3 -c '{LOOK.format(name=file)}'".replace(f"'{file}'", f'"{file}"')
    task = task_of(tasks, source)
    hidden = await Session(open_world(sandbox), task).call("run", command=command)
    assert "PermissionError" in hidden.text
    # The control: without the seal it is read.
    shown = await Session(RepositoryWorld(sandbox), task).call("run", command=command)
    assert "(exit code 0)" in shown.text


async def test_who_rewrites_the_test_or_special_cases_it_gains_nothing(sandbox, tasks):
    task = task_of(tasks, "colorsys")
    session = Session(open_world(sandbox), task)
    await session.call("write", path="test_visible.py", content="print('ok')\n")
    assert "(exit code 0)" in (await session.call("run", command="python3 test_visible.py")).text
    values, reward = await session.scores(sandbox)
    assert (values["visible_tests"], values["hidden_tests"], values["tests_touched"], reward) == (0.0, 0.0, 1.0, 0.0)


async def test_notes_and_helpers_beside_the_code_have_no_say(sandbox, tasks):
    session = Session(open_world(sandbox), task_of(tasks, "colorsys"))
    edit = JSON_SYNTAX.find(REPOSITORY_TOOLS, demonstration(session.task)[0])[0]
    await session.call("edit", **edit.arguments)
    await session.call("write", path="notes.txt", content="found it\n")
    await session.call("write", path="look.py", content="import importlib\nprint(open('colorsys.py').read())\n")
    assert (await session.scores(sandbox))[1] == 1.0
    await session.call("write", path="colorsys.py", content="import importlib\n")
    assert (await session.scores(sandbox))[1] == 0.0


async def test_a_task_that_is_none_is_told(sandbox, tasks):
    whole = task_of(tasks, "colorsys")
    task = msgspec.structs.replace(whole, reference={"source": "colorsys"})
    with pytest.raises(TaskSetError, match="no repair task"):
        await Session(open_world(sandbox), task).call("run", command="python3 test_visible.py")
