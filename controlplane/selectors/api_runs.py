"""Reads for the API: runs and all that belongs to them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Count, Q, QuerySet

from controlplane.errors import NotFound
from controlplane.models import Evaluation, MetricPoint, Project, Rollout, RolloutGroup, Run, Stage, Step
from controlplane.selectors.lttb import lttb
from controlplane.selectors.thinning import points_thinned
from controlplane.states import StepState
from rl_core.store import open_store
from rl_core.types import Trajectory

MAX_SERIES = 100


def runs_of(project: Project) -> QuerySet[Run]:
    """Runs with their lineage's head and how many steps they published."""
    rows = Run.objects.filter(project=project)
    rows = rows.select_related("lineage__model", "lineage__head", "lineage__parent", "created_by")
    return rows.annotate(published_steps=Count("steps", filter=Q(steps__state=StepState.PUBLISHED)))


def stages_of(run: Run) -> QuerySet[Stage]:
    """Stages of a run."""
    return Stage.objects.filter(run=run)


def steps_of(run: Run) -> QuerySet[Step]:
    """Steps of a run."""
    return Step.objects.filter(run=run).select_related("stage", "base_version", "version")


def evaluations_of(project: Project) -> QuerySet[Evaluation]:
    """Evaluations of the project's versions."""
    return Evaluation.objects.filter(project=project).select_related("version", "rubric_version")


def groups_of(project: Project) -> QuerySet[RolloutGroup]:
    """Rollout groups: of runs, and of evaluations outside any run."""
    rows = RolloutGroup.objects.filter(Q(run__project=project) | Q(evaluation__project=project))
    return rows.select_related("task", "step", "admitted_version", "oldest_version")


def rollouts_of(project: Project) -> QuerySet[Rollout]:
    """Rollouts with their scores."""
    rows = Rollout.objects.filter(Q(group__run__project=project) | Q(group__evaluation__project=project))
    rows = rows.select_related("group", "replica", "oldest_version", "newest_version")
    return rows.prefetch_related("scores")


def trajectory_of(rollout: Rollout) -> Trajectory:
    """The rollout's trajectory, from the store. Raises: NotFound before its first turn; StoreError, TrajectoryError."""
    if not rollout.trajectory_key:
        raise NotFound("the rollout has no trajectory yet; it is written after the first turn")
    return Trajectory.from_bytes(open_store(settings.STORE_URL).read(rollout.trajectory_key))


def metric_series(*, run_id: uuid.UUID, names: Sequence[str], points: int) -> list[dict[str, Any]]:
    """The run's series (all, when no name is given), each thinned to at most `points` values.

    x is the step, or for series over time the second. Values that are not finite are counted and left out.
    """
    rows = MetricPoint.objects.filter(run_id=run_id)
    if names:
        wanted: Sequence[str] = names
    else:
        wanted = list(rows.order_by("name").values_list("name", flat=True).distinct()[:MAX_SERIES])
    return [_series(rows.filter(name=name), name, points) for name in wanted]


def _series(rows: QuerySet[MetricPoint], name: str, points: int) -> dict[str, Any]:
    total = rows.count()
    kept = points_thinned(rows, total).order_by("step", "at", "id")
    found = list(kept.values_list("step", "at", "value"))
    finite = [row for row in found if math.isfinite(row[2])]
    drawn = lttb([_x(step, at) for step, at, _ in finite], [value for _, _, value in finite], points)
    return {
        "name": name,
        "total": total,
        "not_finite": len(found) - len(finite),
        "points": [dict(zip(("step", "at", "value"), finite[index], strict=True)) for index in drawn],
    }


def _x(step: int | None, at: datetime) -> float:
    return float(step) if step is not None else at.timestamp()
