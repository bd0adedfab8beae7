"""Judging a repair: the repository with the policy's files, in a fresh sandbox, its answers compared outside.

The repair is data: files by path. Inputs go in under unguessable ids; what should come out never does.
"""

from __future__ import annotations

import ast
import re
import secrets
from pathlib import PurePosixPath

import msgspec

from rl_core.environments.judgement import Judgement
from rl_core.environments.mutation.calls import Test, canonical
from rl_core.environments.mutation.sources import Source, modules_of, parse
from rl_core.environments.mutation.worlds import Subject, run_subjects
from rl_core.environments.tasks import Task
from rl_core.errors import TaskSetError, WorldError
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, Sandbox

LIMITS = RunLimits(
    wall_s=20.0,
    cpu_s=15,
    memory_bytes=768 * MIB,
    pids=16,
    disk_bytes=16 * MIB,
    output_bytes=1 * MIB,
    artifact_files=0,
)
_WITHOUT_LANDLOCK = 3  # what the child exits with
MAX_REPAIR_CHARS = 500_000
# What a repair of one small fault has no use for, unless the file had it before: ways to the original elsewhere.
_WAYS_ROUND = frozenset(
    ("exec", "eval", "compile", "open", "__import__", "importlib", "runpy", "inspect", "modules", "gc")
)
_ENDS = {
    Outcome.TIMEOUT: "the code ran too long",
    Outcome.MEMORY: "the code used too much memory",
    Outcome.OUTPUT_LIMIT: "the code wrote too much output",
}


async def judge_repair(sandbox: Sandbox, task: Task, repair: dict[str, str]) -> Judgement:
    """Judge files that replace those of the task's repository.

    Raises: TaskSetError for a task that is none of these, WorldError when the sandbox does not start or cannot hide the
    original; whatever the repair does is a judgement.
    """
    source, visible, hidden = _read(task)
    refusal = _refusal(source, repair, needed=str(task.reference.get("solution", {}).get("new", "")))
    if refusal:
        return Judgement(visible=0.0, hidden=0.0, first_failure=refusal)
    tests = [visible, *hidden]
    files = {path: text for path, text in repair.items() if path != task.input["test"]}
    subject = Subject(source=source, calls=[test.call for test in tests], files=files, sealed=True)
    run = 5 * (1 + secrets.randbelow(1000))  # a multiple of five: an unknown order and hash seed, the true time
    result, (reply,) = await run_subjects(sandbox, [subject], run=run, limits=LIMITS)
    if result.exit_code == _WITHOUT_LANDLOCK:
        raise WorldError("repairs are judged with the original hidden, which needs a kernel with Landlock (5.13)")
    failures = [_failure(test, answer) for test, answer in zip(tests, reply.answers, strict=True)]
    first = next(filter(None, failures), "")
    reason = _ENDS.get(result.outcome) or reply.detail or ("" if reply.end == "done" else f"the code {reply.end}")
    passed = [not failure for failure in failures]
    shown = _one_line(reason or first) if first else ""
    return Judgement(visible=float(passed[0]), hidden=sum(passed[1:]) / len(hidden), first_failure=shown)


def _read(task: Task) -> tuple[Source, Test, list[Test]]:
    """The broken repository and its tests. Raises: TaskSetError."""
    try:
        files = {str(path): str(text) for path, text in task.input["files"].items() if path != task.input["test"]}
        visible = msgspec.convert(task.reference["visible"], Test)
        hidden = msgspec.convert(task.reference["hidden"], list[Test])
        blocked = tuple(task.reference["blocked"])
        name = str(task.reference["source"])
    except (KeyError, AttributeError, TypeError, msgspec.ValidationError) as error:
        raise TaskSetError(f"task {task.id} is no repair task: {error!r}") from error
    if not hidden:
        raise TaskSetError(f"task {task.id} has no hidden tests")
    source = Source(name, "", "", files, modules_of(files), blocked)
    return source, visible, hidden


def _refusal(source: Source, repair: dict[str, str], *, needed: str) -> str:
    """Why a repair is not even run; or nothing. Words of the known repair (`needed`) are never the reason."""
    if sum(map(len, repair.values())) > MAX_REPAIR_CHARS:
        return f"the repair is longer than {MAX_REPAIR_CHARS} characters"
    known = set(re.findall(r"\w+", needed)).union(*(_words(text) for text in source.files.values()))
    barred = _WAYS_ROUND | set(source.roots) | set(source.blocked)
    for path, text in repair.items():
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or path.startswith("/") or not path.isprintable() or not path.endswith(".py"):
            return f"{path[:80]!r} is no file of the repository"
        new = (_words(text) - known) & barred
        if new:
            return f"a repair does not need {', '.join(sorted(new))}"
    return ""


def _words(text: str) -> set[str]:
    """What a file imports, and the names and attributes that it uses; nothing of what does not parse."""
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            words |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            words |= {(node.module or "").split(".")[0], *(name.name for name in node.names)}
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.MatchClass):
            words.update(node.kwd_attrs)
    return words


def _failure(test: Test, answer: dict[str, object] | None) -> str:
    """Empty when the answer is the expected one, else what was given."""
    if answer is None:
        return "the process ended early"
    try:
        if canonical(answer) == canonical(test.expected):
            return ""
        return f"{test.call.text()} gave {answer.get('raises') or answer.get('value')}"
    except RecursionError:
        return "the answer is nested too deep"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:200]
