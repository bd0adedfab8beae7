"""Models, environments, task sets, rubrics."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import DetailView, ListView, Post, one
from controlplane.api.filters import TaskFilter, TaskSetFilter
from controlplane.api.pagination import Keyset
from controlplane.api.serializers.catalog import (
    EnvironmentSerializer,
    ModelSerializer,
    RubricSerializer,
    RubricVersionInput,
    RubricVersionSerializer,
    TaskSerializer,
    TaskSetInput,
    TaskSetSerializer,
)
from controlplane.errors import Invalid, NotFound
from controlplane.models import ModelCard, Rubric, RubricVersion, Task, TaskSet
from controlplane.permissions import Action
from controlplane.selectors import api_catalog as select
from controlplane.services import catalog
from rl_core.environments.environment import Environment
from rl_core.environments.tasks import parse_task_set
from rl_core.errors import TaskSetError


class ModelList(ListView):
    """Models of the catalogue."""

    serializer_class = ModelSerializer

    def rows(self) -> QuerySet[ModelCard]:
        """Models."""
        return select.models_of(self.project)


class ModelDetail(DetailView):
    """One model."""

    serializer_class = ModelSerializer

    def row(self) -> ModelCard:
        """The model of the path."""
        model: ModelCard = one(select.models_of(self.project), "model", slug=self.kwargs["slug"])
        return model


class EnvironmentList(DetailView):
    """Environments that this build knows: all of them, on one page."""

    serializer_class = EnvironmentSerializer
    many = True

    def get(self, request: Request, **kwargs: Any) -> Response:
        """All of them."""
        return Response([self.rendered(environment) for environment in select.environments()])


class EnvironmentDetail(DetailView):
    """One environment."""

    serializer_class = EnvironmentSerializer

    def row(self) -> Environment:
        """The environment of the path."""
        found = select.environment_of_slug(self.kwargs["slug"])
        if found is None:
            raise NotFound("this build knows no such environment")
        return found


class TaskSetList(Post, ListView):
    """All versions of all task sets. POST stores the slug's next version."""

    actions = {"GET": Action.READ, "POST": Action.CATALOG_WRITE}
    serializer_class = TaskSetSerializer
    input_serializer = TaskSetInput
    filterset_class = TaskSetFilter

    def rows(self) -> QuerySet[TaskSet]:
        """Task sets."""
        return select.task_sets_of(self.project)

    def perform(self, data: dict[str, Any]) -> TaskSet:
        """Validate every task; line n of a complaint is task n of the body, counted from 1."""
        environment = select.environment_of_slug(data["environment"])
        if environment is None:
            known = ", ".join(known.slug for known in select.environments())
            raise Invalid(f"this build knows no such environment; known: {known}", "environment")
        lines = "\n".join(json.dumps(task, ensure_ascii=False) for task in data["tasks"])
        try:
            tasks = parse_task_set(lines.encode())
        except TaskSetError as error:
            raise Invalid(str(error), "tasks") from error
        return catalog.task_set_create(
            project=self.project, slug=data["slug"], environment=environment.slug, tasks=tasks, actor=self.actor
        )


class TaskSetDetail(DetailView):
    """One version of a task set."""

    serializer_class = TaskSetSerializer

    def row(self) -> TaskSet:
        """The task set of the path."""
        task_set: TaskSet = one(select.task_sets_of(self.project), "task set", pk=self.kwargs["id"])
        return task_set


class TaskList(ListView):
    """Tasks of a task set, in file order."""

    serializer_class = TaskSerializer
    filterset_class = TaskFilter

    def rows(self) -> QuerySet[Task]:
        """Tasks."""
        task_set = one(select.task_sets_of(self.project), "task set", pk=self.kwargs["id"])
        return select.tasks_of(self.project).filter(task_set=task_set)

    keyset = Keyset(descending=False)


class TaskDetail(DetailView):
    """One task."""

    serializer_class = TaskSerializer

    def row(self) -> Task:
        """The task of the path."""
        task: Task = one(select.tasks_of(self.project), "task", pk=self.kwargs["id"])
        return task


class RubricList(ListView):
    """Rubrics."""

    serializer_class = RubricSerializer

    def rows(self) -> QuerySet[Rubric]:
        """Rubrics."""
        return select.rubrics_of(self.project)


class RubricDetail(DetailView):
    """One rubric."""

    serializer_class = RubricSerializer

    def row(self) -> Rubric:
        """The rubric of the path."""
        rubric: Rubric = one(select.rubrics_of(self.project), "rubric", slug=self.kwargs["slug"])
        return rubric


class RubricVersionList(Post, ListView):
    """Versions of a rubric, newest first. POST publishes the next one, and the rubric with its first."""

    actions = {"GET": Action.READ, "POST": Action.RUBRICS_PUBLISH}
    serializer_class = RubricVersionSerializer
    input_serializer = RubricVersionInput
    keyset = Keyset("number", int)

    def rows(self) -> QuerySet[RubricVersion]:
        """Versions of a rubric that exists."""
        one(select.rubrics_of(self.project), "rubric", slug=self.kwargs["slug"])
        return select.rubric_versions_of(self.project, self.kwargs["slug"])

    def perform(self, data: dict[str, Any]) -> RubricVersion:
        """Publish. The same content again gives the version that it has already."""
        return catalog.rubric_publish(
            project=self.project,
            slug=self.kwargs["slug"],
            criteria=data["criteria"],
            note=data["note"],
            author=self.principal.user,
            actor=self.actor,
        )


class RubricVersionDetail(DetailView):
    """One version of a rubric."""

    serializer_class = RubricVersionSerializer

    def row(self) -> RubricVersion:
        """The version of the path."""
        rows = select.rubric_versions_of(self.project, self.kwargs["slug"])
        version: RubricVersion = one(rows, "rubric version", number=self.kwargs["number"])
        return version
