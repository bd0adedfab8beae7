"""The score queue: grade a group's trajectories with the rubric version its stage or evaluation pins."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from django.conf import settings

from controlplane.models import Rollout, RolloutGroup, RubricVersion
from controlplane.selectors.environments import environment_of
from controlplane.selectors.graders import graders_of
from controlplane.selectors.task_sets import task_of
from controlplane.services.rollouts import RolloutScores, Scored, score_begin, score_record
from controlplane.states import RolloutState, WorkKind
from rl_core.environments.criteria import Outside
from rl_core.environments.reward import Rubric, combine, grade, parse_rubric
from rl_core.environments.tasks import Task
from rl_core.environments.watch import signs_of, wants_edits
from rl_core.errors import EnvironmentFault, GraderRefused
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import Sandbox
from rl_core.types import Trajectory
from workers.base import Attempt, store, unit_task

log = structlog.get_logger(__name__)

AT_ONCE = 4  # rollouts; what runs code waits in sandboxd's queue besides


@unit_task(WorkKind.SCORE)
def score(attempt: Attempt) -> None:
    """One group. A grader's failure fails the attempt, and is tried again; it is never a score."""
    group = score_begin(attempt.claim)
    if group is None:
        return
    version = rubric_of(group)
    rubric = parse_rubric({"slug": version.rubric.slug, "criteria": version.criteria})
    rollouts = list(group.rollouts.filter(state=RolloutState.FINISHED).order_by("attempt"))  # graded ones stay so
    outside = graders_of(version.rubric.project)
    edits = _wants_edits(group)
    graded = asyncio.run(_grade_all(rubric, task_of(group.task), rollouts, outside, edits=edits))
    attempt.check()
    if score_record(attempt.claim, rubric_version=version, results=[one.scores for one in graded]):
        return
    failures = "; ".join(one.failure for one in graded if one.failure) or "a rollout has no reward"
    raise EnvironmentFault(failures) if all(one.retryable for one in graded) else GraderRefused(failures)


def rubric_of(group: RolloutGroup) -> RubricVersion:
    """The rubric version that a group is graded by. Raises: EnvironmentFault when none is pinned."""
    pinned = group.evaluation.rubric_version if group.evaluation else group.stage and group.stage.rubric_version
    if not pinned:
        raise EnvironmentFault(f"group {group.pk} has no rubric pinned")
    return RubricVersion.objects.select_related("rubric__project").get(pk=pinned.pk)


@dataclass(frozen=True, slots=True)
class _Graded:
    """One rollout's scores; why it has no reward, if so, and whether grading again may help."""

    scores: RolloutScores
    failure: str = ""
    retryable: bool = True


def _wants_edits(group: RolloutGroup) -> bool:
    task_set = group.task.task_set
    environment = environment_of(task_set.project_id, task_set.environment)
    return wants_edits([tool.name for tool in environment.tools] if environment else [], task_of(group.task))


async def _grade_all(
    rubric: Rubric, task: Task, rollouts: list[Rollout], outside: Outside, *, edits: bool
) -> list[_Graded]:
    sandbox: Sandbox | None = SandboxClient(settings.SANDBOX_SOCKET) if settings.SANDBOX_SOCKET.exists() else None
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(rollout: Rollout) -> _Graded:
        async with gate:
            return await _grade_one(rubric, task, rollout, sandbox, outside, edits)

    return list(await asyncio.gather(*map(one, rollouts)))


async def _grade_one(
    rubric: Rubric, task: Task, rollout: Rollout, sandbox: Sandbox | None, outside: Outside, edits: bool
) -> _Graded:
    trajectory = Trajectory.from_bytes(store().get_blob(rollout.trajectory_key))
    scores = await grade(rubric, task=task, trajectory=trajectory, sandbox=sandbox, outside=outside)
    rows = [Scored(row.key, row.value, row.reason, row.error or "") for row in scores]
    try:
        reward = combine(rubric, scores)
        # In a thread: large changes take seconds to read, and the other rollouts' graders wait on this loop.
        signs = await asyncio.to_thread(signs_of, task, trajectory, edits=edits)
        return _Graded(RolloutScores(rollout.pk, rows, reward, signs))
    except EnvironmentFault as error:
        retryable = all(row.retryable for row in scores if row.error)
        return _Graded(RolloutScores(rollout.pk, rows, None), str(error), retryable)
