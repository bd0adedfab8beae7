"""Which version of a task set a name means, and whether runs may start with it."""

from __future__ import annotations

from controlplane.models import Project, TaskSet, TaskSetProof
from controlplane.models import Task as TaskRow
from controlplane.states import ProofState
from rl_core.environments.tasks import Task
from rl_core.types import Split


def task_of(row: TaskRow) -> Task:
    """A row as the library sees it."""
    return Task(id=row.key, split=Split(row.split), input=row.input, reference=row.reference)


def task_set_named(project: Project, name: str) -> TaskSet | None:
    """The newest version of a slug; `slug@3` pins version 3."""
    slug, _, version = name.partition("@")
    rows = TaskSet.objects.filter(project=project, slug=slug)
    if version:
        rows = rows.filter(version=int(version)) if version.isdecimal() and len(version) < 9 else rows.none()
    return rows.order_by("-version").first()


def task_set_versions(task_set: TaskSet) -> list[TaskSet]:
    """All versions under the name of a task set, newest first."""
    rows = TaskSet.objects.filter(project=task_set.project_id, slug=task_set.slug)
    return list(rows.order_by("-version"))


def proof_problem(task_set: TaskSet) -> tuple[str, bool]:
    """Why no run may start with a task set now, and whether that is final; empty when one may."""
    proof = TaskSetProof.objects.filter(task_set=task_set).first()
    if proof is None or proof.state == ProofState.PROVEN:
        return "", False
    if proof.state == ProofState.REFUSED:
        which = ", ".join(str(finding["task"]) for finding in proof.findings[:5])
        count = len(proof.findings)
        return f"{count} tasks of task set {task_set} do not hold ({which}); upload a version without them", True
    return f"waits for the proof of task set {task_set}: {proof.checked} tasks were run", False
