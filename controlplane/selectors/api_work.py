"""Reads for the API: units of work and attempts."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.models import Attempt, Project, WorkUnit
from controlplane.states import WorkState


def work_of(project: Project) -> QuerySet[WorkUnit]:
    """Units of work."""
    return WorkUnit.objects.filter(project=project)


def dead_letters_of(project: Project) -> QuerySet[WorkUnit]:
    """Units that are out of attempts."""
    return work_of(project).filter(state=WorkState.DEAD)


def attempts_of(project: Project) -> QuerySet[Attempt]:
    """Tries at the project's units."""
    return Attempt.objects.filter(unit__project=project).select_related("unit")
