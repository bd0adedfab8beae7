"""Task sets: versioned lists of problems with a train and a held-out split, as JSON Lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    except RecursionError as error:
        raise TaskSetError("nested too deeply") from error
    if not _ID.fullmatch(task.id):
        raise TaskSetError(f"id {task.id[:40]!r} must be 1 to 128 letters, digits or ._:/-")
    if not task.input:
        raise TaskSetError("input must not be empty")
    return task


def _clashes(numbered: Iterable[tuple[int, Task]]) -> list[tuple[int, str]]:
    """Lines whose id or input an earlier line already has.

    Nearly the same input in both splits is a leak: equal but for white space and upper or lower case.
    """
    problems: list[tuple[int, str]] = []
    by_id: dict[str, int] = {}
    by_input: dict[bytes, int] = {}
    by_likeness: dict[tuple[bytes, Split], int] = {}
    for number, task in numbered:
        first_id = by_id.setdefault(task.id, number)
        if first_id != number:
            problems.append((number, f"id {task.id!r} is already on line {first_id}"))
        likeness = blake3(_canonical(likened(task.input))).digest()
        other = Split.HELDOUT if task.split is Split.TRAIN else Split.TRAIN
        leak = by_likeness.get((likeness, other))
        first = by_input.setdefault(blake3(_canonical(task.input)).digest(), number)
        if leak is not None:
            how = "has" if first != number else "has, but for white space and case,"
            problems.append((number, f"leak: {task.split.value} task {how} the input of line {leak} ({other.value})"))
        elif first != number:
            problems.append((number, f"same input as line {first} ({task.split.value})"))
        by_likeness.setdefault((likeness, task.split), number)
    return problems


def likened(value: Any) -> Any:
    """A JSON value whose texts are compared without regard to white space and case."""
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, dict):
        return {str(key): likened(inner) for key, inner in value.items()}
    return [likened(inner) for inner in value] if isinstance(value, list) else value


def unreadable(tasks: Iterable[Task], render: Callable[[Task], object]) -> list[tuple[str, str]]:
    """Tasks (by id) of which an environment cannot make a prompt, each with why. `render` is the environment's own."""
    problems = []
    for task in tasks:
        try:
            render(task)
        except Exception as error:  # noqa: BLE001  # whatever an environment's code makes of a task that is not its own
            problems.append((task.id, f"{type(error).__name__}: {error}"[:200]))
            if len(problems) >= _SHOWN_PROBLEMS:
                break
    return problems


def has_nul(value: Any) -> bool:
    """Whether any text of a JSON value has a NUL character, which PostgreSQL's JSON cannot hold."""
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(has_nul(key) or has_nul(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(has_nul, value))


def _report(problems: list[tuple[int, str]]) -> str:
    shown = [f"line {number}: {problem}" for number, problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    return f"the task set has {len(problems)} broken lines; nothing was stored. " + "; ".join(shown)


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
