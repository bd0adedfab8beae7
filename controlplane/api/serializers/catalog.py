"""Models, environments, task sets, rubrics."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, JSONObjectField
from controlplane.models import ModelCard, Rubric, RubricVersion, Task, TaskSet

MAX_TASKS = 200_000


class ModelSerializer(serializers.ModelSerializer[ModelCard]):
    """A model of the catalogue."""

    class Meta:
        model = ModelCard
        fields = ["id", "slug", "architecture", "parameters", "full_bytes", "root", "manifest_key", "created_at"]
        read_only_fields = fields


class EnvironmentSerializer(serializers.Serializer[Any]):
    """An environment that this build knows."""

    slug = serializers.CharField()
    title = serializers.CharField()
    description = serializers.CharField()
    needs_sandbox = serializers.BooleanField()
    max_turns = serializers.IntegerField()


class TaskSetSerializer(serializers.ModelSerializer[TaskSet]):
    """One version of a task set."""

    class Meta:
        model = TaskSet
        fields = [
            "id",
            "slug",
            "version",
            "environment",
            "content_hash",
            "train_count",
            "heldout_count",
            "created_at",
        ]
        read_only_fields = fields


class TaskSetInput(Input):
    """A new version of a task set. Each task is {id, split, input, reference}."""

    slug = serializers.SlugField(max_length=64)
    environment = serializers.SlugField(max_length=64)
    tasks = serializers.ListField(child=JSONObjectField(), min_length=1, max_length=MAX_TASKS)


class TaskSerializer(serializers.ModelSerializer[Task]):
    """One task."""

    class Meta:
        model = Task
        fields = ["id", "key", "split", "position", "input", "reference"]
        read_only_fields = fields


class RubricSerializer(serializers.ModelSerializer[Rubric]):
    """A rubric's name and its newest version."""

    latest = serializers.IntegerField(read_only=True, allow_null=True, help_text="number of the newest version")

    class Meta:
        model = Rubric
        fields = ["id", "slug", "latest", "created_at"]
        read_only_fields = fields


class RubricVersionSerializer(serializers.ModelSerializer[RubricVersion]):
    """An immutable version of a rubric."""

    rubric = serializers.CharField(source="rubric.slug", read_only=True)
    author = serializers.CharField(source="author.username", read_only=True, default=None, allow_null=True)
    criteria = serializers.ListField(child=serializers.DictField(), read_only=True)

    class Meta:
        model = RubricVersion
        fields = ["id", "rubric", "number", "content_hash", "criteria", "author", "note", "created_at"]
        read_only_fields = fields


class RubricVersionInput(Input):
    """Criteria to publish; each is {key, text, kind, weight, tier, params}."""

    criteria = serializers.ListField(child=JSONObjectField(), min_length=1, max_length=100)
    note = serializers.CharField(max_length=500, required=False, allow_blank=True, default="")
