"""The stockroom: tasks from a seed, tools as operations on a value, and a grade for what was done alone."""

from __future__ import annotations

import json

import msgspec
import pytest

from rl_core.environments.reward import combine, grade
from rl_core.environments.stockroom import RUBRIC, build_task_set, demonstration
from rl_core.environments.stockroom.making import TEMPLATES, UNSEEN_TEMPLATES, make_tasks
from rl_core.environments.stockroom.shelves import Item, Refused, Stockroom
from rl_core.environments.stockroom.world import STATE, TOOLS, StockroomWorld, act
from rl_core.environments.tool_syntax import JSON_SYNTAX, Call
from rl_core.errors import TaskSetError, WorldError
from rl_core.types import Ending, Split, Trajectory

ROOM = Stockroom(
    items={
        "K-1": Item(name="small bolt", stock=5, price=100, shelf="A1"),
        "L-2": Item(name="large bolt", stock=2, price=150, shelf="B1"),
    },
    orders={"Ana": {"K-1": 3}},
)


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("find_items", {"text": "BOLT"}, '["K-1","L-2"]'),
        ("get_item", {"sku": "L-2"}, '{"name":"large bolt","stock":2,"price":150,"shelf":"B1"}'),
        ("list_orders", {"customer": "Ana"}, '{"K-1":3}'),
        ("list_orders", {"customer": "Bo"}, "{}"),
    ],
)
def test_reading_changes_nothing(tool, arguments, text):
    said, after = act(ROOM, tool, arguments)
    assert said == text
    assert after is ROOM


def test_operations():
    after = ROOM.receive("K-1", 4).move("L-2", "C1").order("Ana", "K-1", 9).order("Bo", "L-2", 2).cancel("Ana", "K-1")
    assert after.items["K-1"].stock == 5 + 4 + 3
    assert (after.items["L-2"].stock, after.items["L-2"].shelf) == (0, "C1")
    assert after.orders == {"Bo": {"L-2": 2}}
    assert ROOM.orders == {"Ana": {"K-1": 3}}


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("order", ("Bo", "L-2", 3), "only 2"),
        ("order", ("Bo", "X-9", 1), "no item"),
        ("cancel", ("Bo", "K-1"), "no K-1 on order"),
        ("move", ("K-1", "A1"), "already"),
        ("receive", ("X-9", 1), "no item"),
    ],
)
def test_what_the_stockroom_does_not_do(operation, arguments, message):
    with pytest.raises(Refused, match=message):
        getattr(ROOM, operation)(*arguments)


def test_tasks_are_drawn_from_the_seed():
    one, same, other = (make_tasks(seed=seed, train=40, heldout=20) for seed in (1, 1, 2))
    assert one.content_hash == same.content_hash != other.content_hash
    kinds = {split: {task.reference["template"] for task in build_task_set().split(split)} for split in Split}
    assert kinds == {Split.TRAIN: set(TEMPLATES), Split.HELDOUT: {*TEMPLATES, *UNSEEN_TEMPLATES}}
    for task in build_task_set().tasks:
        assert task.reference[STATE] != task.input[STATE]
        assert msgspec.convert(task.input[STATE], Stockroom)
        calls = [call for turn in demonstration(task) for call in JSON_SYNTAX.find(TOOLS, turn)]
        assert calls
        assert all(isinstance(call, Call) for call in calls)
        assert max(len(JSON_SYNTAX.find(TOOLS, turn)) for turn in demonstration(task)) <= 4


async def played(task, calls):
    """The reward, and the criteria's values, after these calls."""
    world = StockroomWorld()
    state = await world.open(task=task, key="k")
    for call in calls:
        for step in ("s", "s"):  # the same step made again, from the same state
            result = await world.call(task=task, tool=call["name"], arguments=call["arguments"], state=state, step=step)
        state = state if result.state is None else result.state
    artifacts = await world.export(task=task, state=state)
    trajectory = Trajectory(task_id=task.id, messages=[], segments=[], ending=Ending.TERMINATED, artifacts=artifacts)
    scores = await grade(RUBRIC, task=task, trajectory=trajectory, sandbox=None)
    return combine(RUBRIC, scores), [score.value for score in scores]


def task_of(template, **wanted):
    return next(task for task in build_task_set().tasks if task.reference["template"] == template)


async def test_the_state_is_graded_and_not_the_way():
    task = task_of("restock")
    *turns, writes = task.reference["turns"]
    reads = [call for turn in turns for call in turn]
    assert await played(task, [*reads, *writes]) == (1.0, [1.0, 1.0])
    assert await played(task, writes[::-1]) == (1.0, [1.0, 1.0])
    assert await played(task, reads) == (0.0, [0.0, 0.0])
    halves = [{**call, "arguments": {**call["arguments"], "quantity": 1}} for call in writes]
    assert await played(task, writes[:1]) == (pytest.approx(0.15), [0.5, 0.0])
    # A wrong change beside right ones, and too much of a right one, are worth nothing.
    elsewhere = next(sku for sku in task.input[STATE]["items"] if sku not in {w["arguments"]["sku"] for w in writes})
    wrong = {"name": "move", "arguments": {"sku": elsewhere, "shelf": "Z9"}}
    assert await played(task, [*writes, wrong]) == (0.0, [0.0, 0.0])
    assert await played(task, [*writes, halves[0]]) == (0.0, [0.0, 0.0])


async def test_a_refused_call_is_told_and_changes_nothing():
    world, task = StockroomWorld(), task_of("cheapest")
    state = await world.open(task=task, key="k")
    result = await world.call(
        task=task, tool="cancel", arguments={"customer": "Zoe", "sku": "?"}, state=state, step="s"
    )
    assert (result.ok, result.state) == (False, None)
    assert "Zoe has no ?" in result.text
    with pytest.raises(WorldError, match="not a stockroom's state"):
        await world.export(task=task, state=b"[]")
    broken = msgspec.structs.replace(task, input={**task.input, STATE: {"items": [1]}})
    with pytest.raises(TaskSetError, match="no stockroom"):
        await world.open(task=broken, key="k")


async def test_a_world_that_exports_no_state_is_an_error_and_no_score():
    for artifacts in ({}, {STATE: "[" * 100_000}):
        trajectory = Trajectory(task_id="t", messages=[], segments=[], ending=Ending.TERMINATED, artifacts=artifacts)
        scores = await grade(RUBRIC, task=task_of("gather"), trajectory=trajectory, sandbox=None)
        assert all("world_error: the world exported no state" in score.error for score in scores)
        assert json.dumps([score.value for score in scores]) == "[null, null]"
