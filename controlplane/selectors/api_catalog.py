"""Reads for the API: models, task sets, rubrics."""

from __future__ import annotations

from django.db.models import Max, QuerySet

from controlplane.models import ModelCard, Project, Rubric, RubricVersion, Task, TaskSet


def models_of(project: Project) -> QuerySet[ModelCard]:
    """Models of the catalogue."""
    return ModelCard.objects.filter(project=project)


def task_sets_of(project: Project) -> QuerySet[TaskSet]:
    """All versions of all task sets."""
    return TaskSet.objects.filter(project=project)


def tasks_of(project: Project) -> QuerySet[Task]:
    """All tasks of the project's task sets."""
    return Task.objects.filter(task_set__project=project)


def rubrics_of(project: Project) -> QuerySet[Rubric]:
    """Rubrics with the number of their newest version."""
    return Rubric.objects.filter(project=project).annotate(latest=Max("versions__number"))


def rubric_versions_of(project: Project, slug: str) -> QuerySet[RubricVersion]:
    """Versions of one rubric."""
    return RubricVersion.objects.filter(rubric__project=project, rubric__slug=slug).select_related("rubric", "author")
