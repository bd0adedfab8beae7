"""Criteria that run the exported patch: over a fresh copy of the task's files, in a sandbox of its own.

A command's exit code is the weak kind: the policy's code runs in the process that says how it went, and can say what
it likes. Use it for what cannot be cheated (a build, a formatter), or beside an oracle. Unit tests in `unit_tests.py`
are held tighter; see `docs/grading.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rl_core.environments.criteria.graded import Graded, NoParams, Params, Verdict
from rl_core.environments.patch import SNAPSHOT, exported_patch
from rl_core.environments.tasks import Task
from rl_core.errors import PatchRefused, SpecError, TaskSetError
from rl_core.sandbox.protocol import MIB, Layer, Outcome, RunLimits, RunResult, Sandbox

MAX_LAYER_FILES, MAX_LAYER_BYTES = 10_000, 64 * MIB  # a patch, and a task's files where it has no snapshot
# Files that say how tests are collected and run. The policy's have no say where tests decide.
_RUNS_TESTS = re.compile(
    r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py|[^/]*\.pth)$"
)
_TEST = re.compile(r"(^|/)(tests?/|test_[^/]*$|[^/]*_test\.py$)")


class CommandParams(Params, frozen=True):
    """A command, run where the tree lies; `python3` is the sandbox's own. Its exit code must be `exit_code`."""

    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    exit_code: int = 0
    wall_s: float = 30.0
    memory_mib: int = 512

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> RunLimits:
        """Of its run. Raises: SpecError."""
        return run_limits(wall_s=self.wall_s, memory_mib=self.memory_mib)


async def command(graded: Graded, params: CommandParams) -> Verdict:
    """1 when the command ends with the exit code."""
    base, layer = patched(graded.task, exported_patch(graded.trajectory.artifacts))
    result = await run_over(graded.need_sandbox(), list(params.argv), base=base, layer=layer, limits=params.limits())
    if result.outcome is not Outcome.OK:
        return Verdict(0.0, f"the command was ended: {result.outcome.value}")
    right = result.exit_code == params.exit_code
    return Verdict(float(right), f"exit code {result.exit_code}{'' if right else f': {last_line(result)}'}")


async def tests_touched(graded: Graded, _: NoParams) -> Verdict:
    """1 when the patch changes a test that was there, or says how tests are run."""
    before = _files(graded.task)
    touched = sorted(
        path
        for path in exported_patch(graded.trajectory.artifacts)
        if runs_tests(path) or (is_test(path) and (not before or path in before))
    )
    return Verdict(float(bool(touched)), f"changes {', '.join(touched)[:200]}" if touched else "changes no test")


def patched(task: Task, patch: Layer, *, restored: Mapping[str, bytes] | None = None) -> tuple[str, Layer]:
    """Base and layer of the task's files with the patch over them, and over that what graders restore.

    Raises: TaskSetError for a task that has neither files nor a snapshot.
    """
    over: Layer = {**patch, **(restored or {})}
    snapshot = task.input.get(SNAPSHOT)
    if isinstance(snapshot, str) and snapshot:
        return snapshot, over
    files = {path: text.encode() for path, text in _files(task).items()}
    if not files:
        raise TaskSetError(f"task {task.id} has neither files nor a snapshot to put a patch over")
    whole = {**files, **over}
    return "", {path: content for path, content in whole.items() if content is not None}


async def run_over(
    sandbox: Sandbox,
    argv: list[str],
    *,
    base: str,
    layer: Layer,
    limits: RunLimits,
    files: dict[str, bytes] | None = None,
    stdin: bytes = b"",
) -> RunResult:
    """A grader's run over a tree. Raises: PatchRefused for a layer that does not fit its base, WorldError."""
    try:
        return await sandbox.run(
            argv, files=files, stdin=stdin, base=base, layer=layer, limits=limits, client="grading"
        )
    except SpecError as error:
        raise PatchRefused(f"the patch cannot be put over the task's files: {error}") from error


def runs_tests(path: str) -> bool:
    """Whether a file of this name says how tests are collected and run."""
    return _RUNS_TESTS.search(path) is not None


def is_test(path: str) -> bool:
    """Whether a path is that of a test by the names that runners look for."""
    return _TEST.search(path) is not None


def run_limits(*, wall_s: float, memory_mib: int) -> RunLimits:
    """Bounds of a grader's run. Raises: SpecError."""
    if not 1 <= wall_s <= 600:
        raise SpecError(f"wall_s must be in [1, 600], not {wall_s:g}")
    return RunLimits(
        wall_s=wall_s,
        cpu_s=max(1, int(wall_s)),
        memory_bytes=memory_mib * MIB,
        disk_bytes=256 * MIB,
        output_bytes=1 * MIB,
        artifact_files=0,
        layer_files=MAX_LAYER_FILES,
        layer_bytes=MAX_LAYER_BYTES,
    )


def last_line(result: RunResult) -> str:
    """The last line that a run wrote, bounded, safe to show."""
    text = (result.stderr or result.stdout)[-2000:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[-1])[:160] if lines else "no output"


def _files(task: Task) -> dict[str, str]:
    files: Any = task.input.get("files", {})
    try:
        return msgspec.convert(files, dict[str, str])
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {task.id}: input.files must be texts by path: {error}") from error
