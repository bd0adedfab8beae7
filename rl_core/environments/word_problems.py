"""Word problems with a calculator, in two turns: call the tool, then state the number.

Trains on five templates with a in 41…99 and b in 12…40. The held-out split is fixed: the same templates with numbers
that training never shows, and one template that it never shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blake3 import blake3

from rl_core.environments.calculator import CalculatorError, calculate, format_number
from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.tool_syntax import Tags, TagSyntax, Tool
from rl_core.environments.world import LocalTools, ToolResult, World
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams, Split

SLUG = "word-problems"
TRAIN_PER_TEMPLATE = 400
HELDOUT_PER_TEMPLATE = 20
TRAIN_A, TRAIN_B = range(41, 100), range(12, 41)
HELDOUT_A, HELDOUT_B = range(151, 251), range(101, 151)

SYSTEM = "Solve word problems with a calculator. Reply <calc>EXPRESSION</calc> to use it, then Answer: NUMBER"

# Name → (text, operator). The last one is held out.
TEMPLATES: dict[str, tuple[str, str]] = {
    "boxes": ("There are {a} boxes with {b} pens in each. How many pens are there?", "*"),
    "fruit": ("Mia has {a} apples and {b} pears. How many pieces of fruit does she have?", "+"),
    "coins": ("Tom has {a} coins and gives away {b} coins. How many coins are left?", "-"),
    "tickets": ("A ticket costs {b} dollars. How much do {a} tickets cost?", "*"),
    "cars": ("{a} cars are in the first lot and {b} cars in the second. How many cars in all?", "+"),
}
UNSEEN_TEMPLATES: dict[str, tuple[str, str]] = {
    "seats": ("A hall has {a} rows with {b} seats in each row. How many seats does the hall have?", "*"),
}

_EXAMPLES = (
    ("A shelf holds 23 books. How many books do 14 shelves hold?", "23*14", "322"),
    ("Sara had 85 stickers and lost 27. How many does she have now?", "85-27", "58"),
)

CALCULATOR = Tool(
    name="calculator",
    description="The exact value of an expression of numbers, + - * / and parentheses.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    read_only=True,
)
SYNTAX = TagSyntax(
    tags=(Tags(tool=CALCULATOR.name, argument="expression", open="<calc>", close="</calc>"),),
    complaint="Error: write <calc>EXPRESSION</calc>",
)

RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="tool_ran",
            text="The calculator accepted a call",
            kind=CriterionKind.TOOL_RAN,
            weight=0.2,
            tier=Tier.OPTIONAL,
        ),
        Criterion(
            key="tool_result_right",
            text="The calculator's result is the solution",
            kind=CriterionKind.TOOL_RESULT_RIGHT,
            weight=0.3,
        ),
        Criterion(
            key="final_number_right",
            text="The turn after the tool's result states the right number",
            kind=CriterionKind.FINAL_NUMBER_RIGHT,
            weight=0.5,
            tier=Tier.ESSENTIAL,
        ),
    ),
)

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
}


def build_task_set() -> TaskSet:
    """The fixed task set: 2,000 problems to train on and 120 held out, the same on every machine."""
    train = [
        _task(Split.TRAIN, name, a, b)
        for name in TEMPLATES
        for a, b in _draw(name, TRAIN_A, TRAIN_B, TRAIN_PER_TEMPLATE)
    ]
    heldout = [
        _task(Split.HELDOUT, name, a, b)
        for name in (*TEMPLATES, *UNSEEN_TEMPLATES)
        for a, b in _draw(name, HELDOUT_A, HELDOUT_B, HELDOUT_PER_TEMPLATE)
    ]
    return TaskSet((*_shuffled(train), *_shuffled(heldout)))


def messages(task: Task) -> list[Message]:
    """The instruction, two worked examples with the tool's result as a turn of its own, and the problem."""
    opening = [Message(role=Role.SYSTEM, content=SYSTEM)]
    for question, expression, answer in _EXAMPLES:
        opening += [
            Message(role=Role.USER, content=question),
            Message(role=Role.ASSISTANT, content=f"<calc>{expression}</calc>"),
            Message(role=TOOL_ROLE, content=answer),
            Message(role=Role.ASSISTANT, content=f"Answer: {answer}"),
        ]
    return [*opening, Message(role=Role.USER, content=str(task.input["question"]))]


def demonstration(task: Task) -> list[str]:
    """The two turns of a perfect attempt."""
    return [f"<calc>{task.reference['expression']}</calc>", f"Answer: {task.reference['answer']}"]


def run_calculator(task: Task, arguments: dict[str, Any]) -> ToolResult:
    """The tool: the value, or why the expression was refused."""
    try:
        return ToolResult(text=format_number(calculate(arguments["expression"])), ok=True)
    except CalculatorError as error:
        return ToolResult(text=f"Error: {error}", ok=False)


def open_world(sandbox: Sandbox | None) -> World:
    """A world of the calculator alone; it needs no sandbox."""
    return LocalTools({CALCULATOR.name: run_calculator})


def _task(split: Split, name: str, a: int, b: int) -> Task:
    text, operator = (TEMPLATES | UNSEEN_TEMPLATES)[name]
    reference: dict[str, Any] = {
        "answer": str(_ARITHMETIC[operator](a, b)),
        "expression": f"{a}{operator}{b}",
        "template": name,
    }
    return Task(
        id=f"{split.value}-{name}-{a}-{b}",
        split=split,
        input={"question": text.format(a=a, b=b)},
        reference=reference,
    )


def _draw(name: str, a_range: range, b_range: range, count: int) -> list[tuple[int, int]]:
    """`count` pairs without repetition, in an order that depends on the template's name alone."""
    pairs = [(a, b) for a in a_range for b in b_range]
    return sorted(pairs, key=lambda pair: blake3(f"{name}/{pair}".encode()).digest())[:count]


def _shuffled(tasks: list[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: blake3(task.id.encode()).digest())


TOOL_ROLE = Role.TOOL

ENVIRONMENT = Environment(
    slug=SLUG,
    title="Word problems",
    description="Arithmetic in words, solved with a calculator tool in two turns.",
    tools=(CALCULATOR,),
    syntax=SYNTAX,
    tool_role=TOOL_ROLE,
    needs_sandbox=False,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=20),
    max_turns=2,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
)
