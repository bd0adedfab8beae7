"""Task sets: versioned lists of problems with a train and a held-out split, as JSON Lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from blake3 import blake3

from rl_core.errors import TaskSetError
from rl_core.types import Split

MAX_LINE_BYTES = 256 * 1024
MAX_TASKS = 200_000
_SHOWN_PROBLEMS = 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One problem. The policy sees what the environment makes of `input`; `reference` is for graders alone."""

    id: str
    split: Split
    input: dict[str, Any]
    reference: dict[str, Any] = {}


class TaskSet(msgspec.Struct, frozen=True):
    """Tasks in file order, already validated."""

    tasks: tuple[Task, ...]

    def split(self, split: Split) -> list[Task]:
        """The tasks of one split, in file order."""
        return [task for task in self.tasks if task.split is split]

    def to_jsonl(self) -> bytes:
        """Canonical JSON Lines: equal sets give equal bytes."""
        return b"".join(_canonical(task) + b"\n" for task in self.tasks)

    @property
    def content_hash(self) -> str:
        """blake3 of the canonical form: what names this version of the task set."""
        return blake3(self.to_jsonl()).hexdigest()


def parse_task_set(jsonl: bytes) -> TaskSet:
    """Validate a task set. Raises: TaskSetError that names the lines: ill-formed, duplicate, or in both splits."""
    tasks: list[Task] = []
    lines: list[int] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(jsonl.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_parse_line(line))
            lines.append(number)
        except TaskSetError as error:
            problems.append((number, str(error)))
    if not tasks and not problems:
        raise TaskSetError("the task set is empty; it needs one JSON object a line with id, split, input, reference")
    if len(tasks) > MAX_TASKS:
        raise TaskSetError(f"the task set has {len(tasks)} tasks; the limit is {MAX_TASKS}")
    problems += _clashes(zip(lines, tasks, strict=True))
    if problems:
        raise TaskSetError(_report(sorted(problems)))
    return TaskSet(tuple(tasks))


def _parse_line(line: bytes) -> Task:
    if len(line) > MAX_LINE_BYTES:
        raise TaskSetError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        task = msgspec.json.decode(line, type=Task)
    except msgspec.DecodeError as error:
        raise TaskSetError(str(error)) from error
    except UnicodeDecodeError as error:
        raise TaskSetError("not UTF-8") from error
    if not _ID.fullmatch(task.id):
        raise TaskSetError(f"id {task.id[:40]!r} must be 1 to 128 letters, digits or ._:/-")
    if not task.input:
        raise TaskSetError("input must not be empty")
    return task


def _clashes(numbered: Iterable[tuple[int, Task]]) -> list[tuple[int, str]]:
    """Lines whose id or input an earlier line already has; the same input in both splits is a leak."""
    problems: list[tuple[int, str]] = []
    by_id: dict[str, int] = {}
    by_input: dict[bytes, tuple[int, Split]] = {}
    for number, task in numbered:
        first_id = by_id.setdefault(task.id, number)
        if first_id != number:
            problems.append((number, f"id {task.id!r} is already on line {first_id}"))
        first, split = by_input.setdefault(_canonical(task.input), (number, task.split))
        if first != number:
            what = "same input as" if split is task.split else f"leak: {task.split.value} task has the input of"
            problems.append((number, f"{what} line {first} ({split.value})"))
    return problems


def _report(problems: list[tuple[int, str]]) -> str:
    shown = [f"line {number}: {problem}" for number, problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    return f"the task set has {len(problems)} broken lines; nothing was stored. " + "; ".join(shown)


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
