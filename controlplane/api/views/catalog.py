"""Models, environments, task sets, rubrics."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import TaskFilter, TaskSetFilter
from controlplane.api.pagination import Keyset
from controlplane.api.serializers.catalog import (
    EnvironmentSerializer,
    ModelSerializer,
    RubricSerializer,
    RubricVersionInput,
    RubricVersionSerializer,
    TaskSerializer,
    TaskSetFileInput,
    TaskSetInput,
    TaskSetSerializer,
)
from controlplane.api.wire import JsonLinesParser, ParquetParser
from controlplane.errors import NotFound
from controlplane.models import ModelCard, Rubric, RubricVersion, Task, TaskSet
from controlplane.permissions import Action
from controlplane.selectors import api_catalog as select
from controlplane.selectors.environments import environment_of, environments_of
from controlplane.services import catalog
from controlplane.services.task_sets import TaskFile, task_set_upload
from rl_core.environments.environment import Environment


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
    """Environments that ship and those that the project registered: all of them, on one page."""

    serializer_class = EnvironmentSerializer
    many = True

    def get(self, request: Request, **kwargs: Any) -> Response:
        """All of them."""
        return Response([self.rendered(environment) for environment in environments_of(self.project.pk)])


class EnvironmentDetail(DetailView):
    """One environment."""

    serializer_class = EnvironmentSerializer

    def row(self) -> Environment:
        """The environment of the path."""
        found = environment_of(self.project.pk, self.kwargs["slug"])
        if found is None:
            raise NotFound("neither this build nor the project knows such an environment")
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
        lines = "\n".join(json.dumps(task, ensure_ascii=False) for task in data["tasks"])
        return task_set_upload(
            project=self.project,
            slug=data["slug"],
            environment=data["environment"],
            content=lines.encode(),
            kind=TaskFile.JSONL,
            actor=self.actor,
        )


class TaskSetFile(ActionView):
    """A file of tasks as the body: JSON Lines, or a Parquet table with the columns id, split, input, reference."""

    actions = {"POST": Action.CATALOG_WRITE}
    serializer_class = TaskSetSerializer
    input_serializer = TaskSetFileInput
    parser_classes = [JsonLinesParser, ParquetParser]
    body_is_file = True
    query = frozenset({"slug", "environment"})
    success_status = 201

    def validated(self, serializer_class: type[Serializer[Any]]) -> dict[str, Any]:
        """What the address says; the body is the file."""
        serializer = serializer_class(data=self.request.query_params.dict())
        serializer.is_valid(raise_exception=True)
        return {**serializer.validated_data, "content": self.request.data}

    def perform(self, data: dict[str, Any]) -> TaskSet:
        """Check the whole file, and store it as the slug's next version."""
        parquet = (self.request.content_type or "").split(";")[0].strip() == ParquetParser.media_type
        content = data["content"]
        return task_set_upload(
            project=self.project,
            slug=data["slug"],
            environment=data["environment"],
            content=content if isinstance(content, bytes) else b"",
            kind=TaskFile.PARQUET if parquet else TaskFile.JSONL,
            actor=self.actor,
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
