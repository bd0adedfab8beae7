"""Stockroom: what is asked takes several calls of tools, some after one another, some at once.

What counts is the state in which the stockroom was left, not what the policy says of it. Tasks are drawn from a seed;
the held-out split has a kind of task that training never shows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core import tool_calls
from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.stockroom.making import make_tasks
from rl_core.environments.stockroom.world import TOOLS, StockroomWorld
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.world import World
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams

SLUG = "stockroom"
SEED, TRAIN, HELDOUT = 0, 400, 60
SYSTEM = "You keep a stockroom. Do what is asked with the tools, and change nothing else. When it is done, say so."

RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="changes_made",
            text="The share of the changes asked for that were made; nothing when anything else was changed",
            kind=CriterionKind.FINAL_STATE,
            weight=0.3,
            params={"partial": True},
        ),
        Criterion(
            key="state_right",
            text="The stockroom is left as it should be",
            kind=CriterionKind.FINAL_STATE,
            weight=0.7,
            tier=Tier.ESSENTIAL,
        ),
    ),
)


def turn_text(calls: list[dict[str, Any]]) -> str:
    """A turn of calls as the policy writes it."""
    texts = [msgspec.json.encode({"name": call["name"], "arguments": call["arguments"]}).decode() for call in calls]
    return "\n".join(f"{tool_calls.OPEN}\n{text}\n{tool_calls.CLOSE}" for text in texts)


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


# A question, then turns of the assistant's, each with what its calls were answered.
_EXAMPLES = (
    (
        "Put the blue lamp on shelf A2.",
        (
            (turn_text([_call("find_items", text="blue lamp")]), ('["X-100"]',)),
            (turn_text([_call("move", sku="X-100", shelf="A2")]), ("done",)),
            ("The blue lamp is on shelf A2.", ()),
        ),
    ),
    (
        "Gil wants 3 of Y-200 and 2 of Z-300. Order them.",
        (
            (
                turn_text(
                    [
                        _call("order", customer="Gil", sku="Y-200", quantity=3),
                        _call("order", customer="Gil", sku="Z-300", quantity=2),
                    ]
                ),
                ("done", "done"),
            ),
            ("Both are ordered for Gil.", ()),
        ),
    ),
)


def build_task_set() -> TaskSet:
    """The fixed task set: the same on every machine."""
    return make_tasks(seed=SEED, train=TRAIN, heldout=HELDOUT)


def messages(task: Task) -> list[Message]:
    """The instruction, two worked examples (one with calls side by side), and the question."""
    opening = [Message(role=Role.SYSTEM, content=SYSTEM)]
    for question, turns in _EXAMPLES:
        opening.append(Message(role=Role.USER, content=question))
        for said, answers in turns:
            opening.append(Message(role=Role.ASSISTANT, content=said))
            opening += [Message(role=Role.TOOL, content=answer) for answer in answers]
    return [*opening, Message(role=Role.USER, content=str(task.input["question"]))]


def demonstration(task: Task) -> list[str]:
    """The calls of one way to do it, turn by turn, and that it is done."""
    return [*(turn_text(calls) for calls in task.reference["turns"]), "It is done."]


def open_world(sandbox: Sandbox | None) -> World:
    """The stockroom's world; it needs no sandbox."""
    return StockroomWorld()


ENVIRONMENT = Environment(
    slug=SLUG,
    title="Stockroom",
    description="Orders and stock, changed with several tools in several turns, judged by the state that is left.",
    tools=TOOLS,
    tool_role=Role.TOOL,
    needs_sandbox=False,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=200),
    max_turns=6,
    max_context_tokens=3072,
    max_parallel_calls=4,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
)
