"""Reads for the pages: the plans of the runs that rollouts are made for."""

from __future__ import annotations

from controlplane.models import Project, Run
from controlplane.selectors.capacity import RunCapacity, capacity_of
from controlplane.states import RunState, StepState

MOST_RUNS = 3


def capacity_view(project: Project) -> list[RunCapacity]:
    """The plans of the newest running runs; of the newest run with a step where none runs."""
    runs = Run.objects.filter(project=project).order_by("-created_at")
    running = list(runs.filter(state=RunState.RUNNING)[:MOST_RUNS])
    if not running:
        running = list(runs.filter(steps__state=StepState.PUBLISHED).distinct()[:1])
    return [capacity_of(run) for run in running]
