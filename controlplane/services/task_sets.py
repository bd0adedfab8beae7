"""Task sets from outside: read, checked as a whole, stored as the next version or not at all; then proven."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from django.db.models.functions import Now

from controlplane.errors import Invalid, Unavailable
from controlplane.models import Project, Task, TaskSet, TaskSetProof
from controlplane.selectors.environments import environment_of, environments_of
from controlplane.services.catalog import task_set_create
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.transitions import transition
from controlplane.services.work import Claim, work_fenced, work_finish
from controlplane.states import ActorKind, EventType, ProofState
from rl_core.environments.environment import Environment
from rl_core.environments.parquet import NO_PYARROW, PROCESSOR_S
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.environments.tasks import parse_task_set, unreadable
from rl_core.errors import TaskSetError

PROVER = Actor(ActorKind.WORKER, "prove")
MAX_FINDINGS = 100
_SHOWN = 20


class TaskFile(StrEnum):
    """What a task set is uploaded as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def task_set_upload(
    *, project: Project, slug: str, environment: str, content: bytes, kind: TaskFile, actor: Actor
) -> TaskSet:
    """Check a file of tasks and store it as the slug's next version; it is proven next where its tasks bring tests.

    Raises: Invalid, naming the lines, for a set that is broken, leaks, or is not of the environment: nothing is stored.
    """
    found = environment_of(project.pk, environment)
    if found is None:
        known = ", ".join(one.slug for one in environments_of(project.pk))
        raise Invalid(f"there is no such environment; known: {known}", "environment")
    lines = content if kind is TaskFile.JSONL else from_parquet(content)
    try:
        tasks = parse_task_set(lines)
    except TaskSetError as error:
        raise Invalid(str(error), "tasks") from error
    _check_prompts(found, tasks)
    prove = found.proof is not None
    return task_set_create(project=project, slug=slug, environment=found.slug, tasks=tasks, actor=actor, prove=prove)


def from_parquet(content: bytes) -> bytes:
    """A Parquet table as JSON Lines, read in a process of its own. Raises: Invalid, Unavailable without pyarrow."""
    command = [sys.executable, "-m", "rl_core.environments.parquet"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=2 * PROCESSOR_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Invalid("the Parquet file takes too long to read; upload JSON Lines", "tasks") from error
    if done.returncode == NO_PYARROW:
        raise Unavailable(
            "Parquet needs pyarrow, which is not installed: pip install 'slipway[parquet]', or JSON Lines"
        )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it ended its reader"]
        raise Invalid(f"the file is not a Parquet table of tasks: {why[0][:300]}", "tasks")
    return done.stdout


def proof_begin(claim: Claim) -> TaskSetProof | None:
    """The proof to work on; None when it is over (the unit is finished then)."""
    with work_fenced(claim):
        proof = TaskSetProof.objects.select_related("task_set__project").get(pk=claim.ref)
        if proof.state != ProofState.PENDING:
            work_finish(claim)
            return None
    return proof


def proof_tasks(proof: TaskSetProof, count: int) -> list[Task]:
    """The next tasks that are to be run; none once MAX_FINDINGS do not hold: then the set is refused in any case."""
    if len(proof.findings) >= MAX_FINDINGS:
        return []
    return list(proof.task_set.tasks.order_by("pk")[proof.checked : proof.checked + count])


def proof_note(claim: Claim, *, proof: TaskSetProof, checked: int, findings: Sequence[dict[str, Any]]) -> None:
    """Write down further tasks that were run, and those of them that do not hold. Raises: StaleFence."""
    with work_fenced(claim):
        proof.checked += checked
        proof.findings = [*proof.findings, *findings]
        proof.save(update_fields=["checked", "findings"])


def proof_finish(claim: Claim, *, proof: TaskSetProof) -> TaskSetProof:
    """Every task was run, or too many do not hold: the set holds, or is refused. Raises: StaleFence."""
    with work_fenced(claim):
        to = ProofState.REFUSED if proof.findings else ProofState.PROVEN
        transition(proof, to=to, finished_at=Now())
        work_finish(claim)
        task_set = proof.task_set
        event_append(
            project_id=task_set.project_id,
            topic=project_topic(task_set.project_id),
            event_type=EventType.TASK_SET_PROVEN,
            actor=PROVER,
            data={
                "task_set": str(task_set.pk),
                "slug": task_set.slug,
                "version": task_set.version,
                "state": to.value,
                "checked": proof.checked,
                "refused": len(proof.findings),
            },
        )
    return proof


def _check_prompts(environment: Environment, tasks: TaskList) -> None:
    problems = unreadable(tasks.tasks, environment.messages)
    if problems:
        shown = "; ".join(f"task {task}: {why}" for task, why in problems[:_SHOWN])
        text = f"environment {environment.slug!r} makes no prompt of these tasks; nothing was stored. {shown}"
        raise Invalid(text, "tasks")
