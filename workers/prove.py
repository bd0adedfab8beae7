"""Proving task sets, on the score queue: each task's own tests, before the fix and with the reference solution."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from django.conf import settings

from controlplane.models import Task as TaskRow
from controlplane.selectors.environments import environment_of
from controlplane.selectors.task_sets import task_of
from controlplane.services.task_sets import proof_begin, proof_finish, proof_note, proof_tasks
from controlplane.services.work import work_yield
from controlplane.states import WorkKind
from rl_core.environments.environment import Environment
from rl_core.environments.proof import ProofVerdict
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import Sandbox
from workers.base import Attempt, unit_task

AT_ONCE = 4


@unit_task(WorkKind.PROVE)
def prove(attempt: Attempt) -> None:
    """One slice; it goes on in another where this one ended. A world's failure fails the attempt and is no verdict."""
    proof = proof_begin(attempt.claim)
    if proof is None:
        return
    environment = environment_of(proof.task_set.project_id, proof.task_set.environment)
    if environment is None:
        raise EnvironmentFault(f"environment {proof.task_set.environment!r} is not of this project any more")
    sandbox = SandboxClient(settings.SANDBOX_SOCKET)
    ends_at = time.monotonic() + settings.ROLLOUT_SLICE_S
    while tasks := proof_tasks(proof, AT_ONCE):
        if time.monotonic() >= ends_at:
            work_yield(attempt.claim)
            return
        findings = asyncio.run(_findings(environment, sandbox, tasks))
        attempt.check()
        proof_note(attempt.claim, proof=proof, checked=len(tasks), findings=findings)
    proof_finish(attempt.claim, proof=proof)


async def _findings(environment: Environment, sandbox: Sandbox, rows: list[TaskRow]) -> list[dict[str, Any]]:
    """What does not hold. Raises: WorldError; EnvironmentFault for an environment that proves nothing."""
    if environment.proof is None:
        raise EnvironmentFault(f"environment {environment.slug!r} has no proof of its tasks in this build")
    tasks = [task_of(row) for row in rows]
    proofs = await asyncio.gather(*(_proof(environment, sandbox, task) for task in tasks))
    return [
        {"task": task.id, "verdict": verdict, "detail": detail}
        for task, (verdict, detail) in zip(tasks, proofs, strict=True)
        if verdict != ProofVerdict.HOLDS
    ]


async def _proof(environment: Environment, sandbox: Sandbox, task: Task) -> tuple[str, str]:
    assert environment.proof is not None
    try:
        found = await environment.proof(sandbox, task)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a reference that is not the environment's
        return ProofVerdict.REFERENCE_FAILS.value, f"its reference does not read: {type(error).__name__}: {error}"[:200]
    return found.verdict.value, found.detail[:200]
