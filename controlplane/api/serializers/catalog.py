"""Models, environments, task sets, rubrics."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, JSONObjectField
from controlplane.models import ModelCard, Rubric, RubricVersion, Task, TaskSet
from controlplane.states import ProofState
from rl_core.environments.proof import ProofVerdict

MAX_TASKS = 200_000


class ModelSerializer(serializers.ModelSerializer[ModelCard]):
    """A model of the catalogue."""

    class Meta:
        model = ModelCard
        fields = ["id", "slug", "architecture", "parameters", "full_bytes", "root", "manifest_key", "created_at"]
        read_only_fields = fields


class EnvironmentSerializer(serializers.Serializer[Any]):
    """An environment that ships, or that the project registered: its description says so."""

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


class TaskSetFileInput(Input):
    """Where a file of tasks goes."""

    slug = serializers.SlugField(max_length=64)
    environment = serializers.SlugField(max_length=64)


class FindingSerializer(serializers.Serializer[Any]):
    """A task that does not hold."""

    task = serializers.CharField()
    verdict = serializers.ChoiceField(choices=[verdict.value for verdict in ProofVerdict])
    detail = serializers.CharField()


class TaskSetReportSerializer(serializers.Serializer[Any]):
    """What is known of a set's tasks: their proof (null where none was asked for), and how hard the train split is."""

    proof = serializers.ChoiceField(choices=ProofState.choices, allow_null=True)
    checked = serializers.IntegerField()
    findings = FindingSerializer(many=True)
    tasks = serializers.IntegerField()
    tried = serializers.IntegerField()
    attempts = serializers.IntegerField()
    histogram = serializers.ListField(child=serializers.IntegerField(), help_text="tasks by tenths of mean reward")


class TaskVersionSerializer(serializers.Serializer[Any]):
    """One policy version's attempts at a task."""

    version = serializers.CharField()
    run = serializers.UUIDField(source="run_id", allow_null=True)
    attempts = serializers.IntegerField()
    passes = serializers.IntegerField()
    mean_reward = serializers.FloatField()


class TaskHistorySerializer(serializers.Serializer[Any]):
    """What is believed of a task, and what each policy version's attempts came to. Estimates are shrunken."""

    attempts = serializers.IntegerField()
    passes = serializers.IntegerField()
    mean = serializers.FloatField(source="known.mean")
    variance = serializers.FloatField(source="known.variance")
    versions = TaskVersionSerializer(many=True)


class SignsSerializer(serializers.Serializer[Any]):
    """What the rollouts of one policy version showed: each sign's share, null where nothing was to be counted."""

    version = serializers.CharField(source="version.ref")
    rollouts = serializers.IntegerField()
    signs = serializers.DictField(child=serializers.FloatField(allow_null=True))


class ComparedSerializer(serializers.Serializer[Any]):
    """One behaviour, per turn, of a version's rollouts and of its answers to users."""

    key = serializers.CharField()
    simulation = serializers.FloatField(source="found.mean_first")
    production = serializers.FloatField(source="found.mean_second")
    effect = serializers.FloatField(source="found.effect", help_text="largest distance of the distribution functions")
    p = serializers.FloatField(source="found.p")


class EnvironmentWatchSerializer(serializers.Serializer[Any]):
    """Signs of cheating by version, newest first; simulation against production of the newest that has both."""

    versions = SignsSerializer(many=True)
    compared_version = serializers.CharField(allow_null=True)
    compared = ComparedSerializer(many=True)


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
