"""Bug repair: a small real repository with one fault, a failing test, and tools to read, edit and run it.

Tasks are made by `python -m rl_core.environments.mutation`, which proves each; see `docs/tasks.md`. The shipped set is
small; a larger one can be made and uploaded. The original of a repository is hidden from the policy's commands as from
its repair under judgement. The reward is the oracle's, over the exported patch, in a sandbox of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from rl_core import tool_calls
from rl_core.environments.bug_repair.proving import proof
from rl_core.environments.criteria import CriterionKind
from rl_core.environments.environment import Environment
from rl_core.environments.packed import unpack
from rl_core.environments.repository.tools import EDIT, GREP, LIST, READ, RUN, SUBMIT
from rl_core.environments.repository.world import Command, RepositoryWorld
from rl_core.environments.reward import Criterion, Rubric, Tier
from rl_core.environments.tasks import Task, TaskSet
from rl_core.environments.world import World
from rl_core.errors import SandboxRefused, TaskSetError
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Message, Role, SamplingParams

SLUG = "bug-repair"
# Made by: python -m rl_core.environments.mutation --seed 0 --count 60 --out tasks.jsonl.zst --sources with SOURCES.
TASKS: Final = Path(__file__).with_name("tasks.jsonl.zst")
SOURCES: Final = (
    "bisect,colorsys,reprlib,fnmatch,sched,quopri,getopt,copy,graphlib,string,csv,base64,gettext,heapq,calendar,fractions,"
    "netrc,mdurl,encodings.punycode,pprint,mimetypes,http.cookies,shlex,textwrap,inflection,iniconfig,uritemplate,"
    "email.quoprimime,email._parseaddr,tomllib"
)
SYSTEM = "You repair repositories. Find the fault with the tools, edit the code, see the test pass, then submit."
MAX_LISTED = 40
_MUTATION = Path(__file__).parents[1] / "mutation"
_SEALED = {name: (_MUTATION / name).read_bytes() for name in ("sealed.py", "sealing.py")}

_ORACLE = {"oracle": "repair"}
RUBRIC = Rubric(
    slug=SLUG,
    criteria=(
        Criterion(
            key="visible_tests",
            text="The failing test that was shown passes",
            kind=CriterionKind.VISIBLE_TESTS,
            weight=0.2,
            params=_ORACLE,
        ),
        Criterion(
            key="hidden_tests",
            text="All tests pass, those that are not shown too",
            kind=CriterionKind.HIDDEN_TESTS,
            weight=0.8,
            tier=Tier.ESSENTIAL,
            params=_ORACLE,
        ),
        Criterion(
            key="test_gap",
            text="How much more of the shown test passes than of the others (watched)",
            kind=CriterionKind.TEST_GAP,
            weight=0.0,
            tier=Tier.PITFALL,
            params=_ORACLE,
        ),
        Criterion(
            key="tests_touched",
            text="The test, or what says how tests run, was changed (watched)",
            kind=CriterionKind.TESTS_TOUCHED,
            weight=0.0,
            tier=Tier.PITFALL,
        ),
    ),
)


def call_text(tool: str, **arguments: Any) -> str:
    """A call as the policy writes it."""
    call = msgspec.json.encode({"name": tool, "arguments": arguments}).decode()
    return f"{tool_calls.OPEN}\n{call}\n{tool_calls.CLOSE}"


# One worked example: the assistant's turns, each with what it was answered.
_EXAMPLE_TASK = "`python test_visible.py` fails. Repair the code.\n\nshop.py\ntest_visible.py"
_EXAMPLE = (
    (call_text(RUN.name, command="python3 test_visible.py"), "AssertionError: -1\n(exit code 1)"),
    (call_text(READ.name, path="shop.py"), "1\tdef total(prices):\n2\t    return -sum(prices)"),
    (call_text(EDIT.name, path="shop.py", old="-sum(prices)", new="sum(prices)"), "edited shop.py at line 2"),
    (call_text(RUN.name, command="python3 test_visible.py"), "(exit code 0)"),
    (call_text(SUBMIT.name), "submitted"),
)


def build_task_set() -> TaskSet:
    """The shipped task set, read from the package."""
    return unpack(TASKS)


def messages(task: Task) -> list[Message]:
    """The instruction, a worked example, and the task with its files' names."""
    opening = [Message(role=Role.SYSTEM, content=SYSTEM), Message(role=Role.USER, content=_EXAMPLE_TASK)]
    for said, answer in _EXAMPLE:
        opening += [Message(role=Role.ASSISTANT, content=said), Message(role=Role.TOOL, content=answer)]
    names = sorted(task.input["files"])
    more = [f"({len(names) - MAX_LISTED} more)"] if len(names) > MAX_LISTED else []
    listed = "\n".join([*names[:MAX_LISTED], *more])
    return [*opening, Message(role=Role.USER, content=f"{task.input['instruction']}\n\n{listed}")]


def demonstration(task: Task) -> list[str]:
    """The known repair as one edit, and the submission."""
    solution = task.reference["solution"]
    text = str(task.input["files"][solution["file"]])
    start = int(solution["offset"])
    end = start + len(solution["old"])
    first, last = text.rfind("\n", 0, start) + 1, _line_end(text, end)
    while text.count(text[first:last]) > 1:  # an edit names a text that is there once
        first, last = text.rfind("\n", 0, max(first - 1, 0)) + 1, _line_end(text, last + 1)
    old = text[first:last]
    new = text[first:start] + solution["new"] + text[end:last]
    return [call_text(EDIT.name, path=solution["file"], old=old, new=new), call_text(SUBMIT.name)]


def sealed(task: Task, argv: list[str]) -> Command:
    """The policy's command with the original hidden, where the task has one. Raises: TaskSetError."""
    if "source" not in task.reference:  # a repository that was built: its original is nowhere in a world
        return Command(argv, {})
    try:
        source, blocked = str(task.reference["source"]), ",".join(task.reference["blocked"])
    except (KeyError, TypeError) as error:
        raise TaskSetError(f"task {task.id} is no repair task: {error!r}") from error
    return Command(["python3", "-I", "-S", "/work/sealed.py", source, blocked, *argv], _SEALED)


def open_world(sandbox: Sandbox | None) -> World:
    """A world of the task's files. Raises: SandboxRefused without a sandbox."""
    if sandbox is None:
        raise SandboxRefused(
            "bug-repair runs model-written code and needs sandboxd; start it with `python -m rl_core.sandbox`"
        )
    return RepositoryWorld(sandbox, prepare=sealed)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


ENVIRONMENT = Environment(
    slug=SLUG,
    title="Bug repair",
    description="Small real repositories with one fault, repaired with tools that read, edit and run them.",
    tools=(READ, LIST, GREP, EDIT, RUN, SUBMIT),
    tool_role=Role.TOOL,
    needs_sandbox=True,
    rubric=RUBRIC,
    sampling=SamplingParams(max_tokens=400),
    max_turns=16,
    max_context_tokens=8192,
    messages=messages,
    open_world=open_world,
    build_task_set=build_task_set,
    demonstration=demonstration,
    proof=proof,
)
