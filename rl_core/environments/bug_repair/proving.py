"""Whether a task of a repository is one: what tells the fault from the repair does so each time."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.environments.criteria.graded import Graded
from rl_core.environments.criteria.unit_tests import judge_tests
from rl_core.environments.mutation.grading import judge_repair
from rl_core.environments.patch import PATCH, encode_patch
from rl_core.environments.proof import Proof, ProofVerdict, prove
from rl_core.environments.tasks import Task
from rl_core.errors import TaskSetError
from rl_core.sandbox.protocol import Layer, Sandbox
from rl_core.types import Trajectory


async def proof(sandbox: Sandbox, task: Task) -> Proof:
    """Of a task made by a mutation, or of a repository that was built. Raises: TaskSetError, WorldError."""
    if "unit_tests" in task.reference:
        return await _of_unit_tests(sandbox, task)
    return await _of_mutation(sandbox, task)


async def _of_mutation(sandbox: Sandbox, task: Task) -> Proof:
    """The visible test fails with the fault; it and the hidden tests pass with the known repair."""
    solution = task.reference["solution"]
    path, broken = str(solution["file"]), str(task.input["files"][solution["file"]])
    start, old = int(solution["offset"]), str(solution["old"])
    if broken[start : start + len(old)] != old:
        return Proof(ProofVerdict.REFERENCE_FAILS, f"the repair's text is not in {path}")
    repaired = broken[:start] + str(solution["new"]) + broken[start + len(old) :]

    async def run(solved: bool) -> bool:
        judged = await judge_repair(sandbox, task, {path: repaired if solved else broken})
        return judged.passed if solved else judged.visible == 1.0

    return await prove(run)


async def _of_unit_tests(sandbox: Sandbox, task: Task) -> Proof:
    """The wanted tests do not all pass as the policy finds it, and all pass with the files of the repair."""
    try:
        repair = msgspec.convert(task.reference.get("repair"), dict[str, str])
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {task.id}: reference.repair must be texts by path: {error}") from error
    solution: Layer = {path: text.encode() for path, text in repair.items()}

    async def run(solved: bool) -> bool:
        artifacts: dict[str, Any] = {PATCH: encode_patch(solution if solved else {})}
        trajectory = Trajectory(task_id=task.id, messages=[], segments=[], artifacts=artifacts)
        return (await judge_tests(Graded(task, trajectory, sandbox))).passed

    return await prove(run)
