"""The score queue: grade a group's trajectories with the rubric version its stage or evaluation pins."""

from __future__ import annotations

import asyncio

import structlog
from django.conf import settings

from controlplane.models import Rollout, RolloutGroup, RubricVersion
from controlplane.services.rollouts import RolloutScores, Scored, score_begin, score_record
from controlplane.states import WorkKind
from rl_core.environments.reward import Rubric, combine, grade, parse_rubric
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Split, Trajectory
from workers.base import Attempt, store, unit_task

log = structlog.get_logger(__name__)


@unit_task(WorkKind.SCORE)
def score(attempt: Attempt) -> None:
    """One group. A grader's failure fails the attempt, and is tried again; it is never a score."""
    group = score_begin(attempt.claim)
    if group is None:
        return
    version = rubric_of(group)
    rubric = parse_rubric({"slug": version.rubric.slug, "criteria": version.criteria})
    rollouts = list(group.rollouts.order_by("attempt"))
    results, failures = asyncio.run(_grade_all(rubric, group, rollouts))
    attempt.check()
    if not score_record(attempt.claim, rubric_version=version, results=results):
        raise EnvironmentFault("; ".join(failures) or "a rollout has no reward")


def rubric_of(group: RolloutGroup) -> RubricVersion:
    """The rubric version that a group is graded by. Raises: EnvironmentFault when none is pinned."""
    pinned = group.evaluation.rubric_version if group.evaluation else group.stage and group.stage.rubric_version
    if not pinned:
        raise EnvironmentFault(f"group {group.pk} has no rubric pinned")
    return RubricVersion.objects.select_related("rubric").get(pk=pinned.pk)


async def _grade_all(
    rubric: Rubric, group: RolloutGroup, rollouts: list[Rollout]
) -> tuple[list[RolloutScores], list[str]]:
    task = Task(
        id=group.task.key, split=Split(group.task.split), input=group.task.input, reference=group.task.reference
    )
    sandbox: Sandbox | None = SandboxClient(settings.SANDBOX_SOCKET) if settings.SANDBOX_SOCKET.exists() else None
    graded = [await _grade_one(rubric, task, rollout, sandbox) for rollout in rollouts]
    return [result for result, _ in graded], [failure for _, failure in graded if failure]


async def _grade_one(
    rubric: Rubric, task: Task, rollout: Rollout, sandbox: Sandbox | None
) -> tuple[RolloutScores, str]:
    trajectory = Trajectory.from_bytes(store().get_blob(rollout.trajectory_key))
    scores = await grade(rubric, task=task, trajectory=trajectory, sandbox=sandbox)
    rows = [Scored(row.key, row.value, row.reason, row.error or "") for row in scores]
    try:
        return RolloutScores(rollout.pk, rows, combine(rubric, scores)), ""
    except EnvironmentFault as error:
        return RolloutScores(rollout.pk, rows, None), str(error)
