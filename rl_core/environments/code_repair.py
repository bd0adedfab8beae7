"""Code repair with a test tool: a one-line function with a bug, an assertion, and up to two tries in the sandbox.

The tool and the grader are the oracle outside: neither the assertion's outcome nor the hidden tests are decided where
the policy's code runs.
"""

from __future__ import annotations

from typing import Any

from rl_core.environments.bugs import HELDOUT_BUGS, TRAIN_BUGS, Bug
from rl_core.environments.candidates import RUN, SYNTAX, open_world
from rl_core.environments.criteria import CriterionKind
from rl_core.environments.criteria.oracles import read_cases
from rl_core.environments.environment import Environment
from rl_core.environments.oracle import judge_cases
from rl_core.environments.proof import Proof, prove
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.tasks import Task, TaskSet
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams, Split

SLUG = "code-repair"
TOOL_ROLE = Role.TOOL

SYSTEM = "Fix the function. Reply <run>CODE</run> to test it."

# Question, then the assistant's tries, each with what the tool answered.
_EXAMPLES = (
    ("def quadruple(x): return x + 4\nassert quadruple(3) == 12", (("def quadruple(x): return x * 4", "PASS"),)),
    (
        "def last(s): return s[0]\nassert last('abc') == 'c'",
        (
            ("def last(s): return s[1]", "last('abc') gave 'b'"),
            ("def last(s): return s[-1]", "PASS"),
        ),
    ),
)

RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="defines_function",
            text="The candidate defines the function asked for",
            kind=CriterionKind.DEFINES_FUNCTION,
            weight=0.2,
            tier=Tier.OPTIONAL,
        ),
        Criterion(
            key="visible_tests",
            text="The candidate passes the test it was shown (watched, to compare with the hidden tests)",
            kind=CriterionKind.VISIBLE_TESTS,
            weight=0.0,
            tier=Tier.OPTIONAL,
        ),
        Criterion(
            key="hidden_tests",
            text="It passes the visible and all hidden tests; worth less at the second call",
            kind=CriterionKind.HIDDEN_TESTS,
            weight=0.8,
            tier=Tier.ESSENTIAL,
            params={"later": 0.625},
        ),
        Criterion(
            key="test_gap",
            text="How much more of the visible tests passes than of the hidden ones (watched)",
            kind=CriterionKind.TEST_GAP,
            weight=0.0,
            tier=Tier.PITFALL,
        ),
    ),
)


def build_task_set() -> TaskSet:
    """The fixed task set: every bug of the catalogue, functions held out never trained on."""
    train = [_task(Split.TRAIN, bug) for bug in TRAIN_BUGS]
    return TaskSet((*train, *(_task(Split.HELDOUT, bug) for bug in HELDOUT_BUGS)))


def messages(task: Task) -> list[Message]:
    """The instruction, two worked examples (one repaired at the second call), and the function."""
    opening = [Message(role=Role.SYSTEM, content=SYSTEM)]
    for question, tries in _EXAMPLES:
        opening.append(Message(role=Role.USER, content=question))
        for code, answer in tries:
            opening += [
                Message(role=Role.ASSISTANT, content=f"<run>{code}</run>"),
                Message(role=TOOL_ROLE, content=answer),
            ]
    return [*opening, Message(role=Role.USER, content=f"{task.input['code']}\n{task.input['assertion']}")]


def demonstration(task: Task) -> list[str]:
    """The one turn of a perfect attempt."""
    return [f"<run>{task.reference['solution']}</run>"]


async def proof(sandbox: Sandbox, task: Task) -> Proof:
    """The visible test fails before the fix; it and the hidden tests pass with the solution. Raises: WorldError."""
    shown, hidden = (read_cases(task.id, task.reference[name]) for name in ("visible", "hidden"))
    function = str(task.reference["function"])

    async def run(solved: bool) -> bool:
        code = str(task.reference["solution"] if solved else task.input["code"])
        cases = [*shown, *hidden] if solved else shown
        return (await judge_cases(sandbox, code=code, function=function, cases=cases)).passed

    return await prove(run)


def _task(split: Split, bug: Bug) -> Task:
    reference: dict[str, Any] = {
        "function": bug.name,
        "solution": f"def {bug.name}({bug.params}): return {bug.right}",
        "visible": _case(bug, bug.visible),
        "hidden": [_case(bug, args) for args in bug.hidden],
    }
    shown = ", ".join(repr(arg) for arg in bug.visible)
    return Task(
        id=f"{split.value}-{bug.name}",
        split=split,
        input={
            "code": f"def {bug.name}({bug.params}): return {bug.wrong}",
            "assertion": f"assert {bug.name}({shown}) == {bug.solve(*bug.visible)!r}",
        },
        reference=reference,
    )


def _case(bug: Bug, args: tuple[Any, ...]) -> dict[str, Any]:
    return {"args": list(args), "result": bug.solve(*args)}


ENVIRONMENT = Environment(
    slug=SLUG,
    title="Code repair",
    description="One-line functions with a bug, repaired with a tool that runs the candidate in a sandbox.",
    tools=(RUN,),
    syntax=SYNTAX,
    tool_role=TOOL_ROLE,
    needs_sandbox=True,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=40),
    max_turns=2,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
    proof=proof,
)
