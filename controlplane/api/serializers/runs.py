"""Runs, stages, steps, evaluations, metrics."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, JSONObjectField, ReasonInput, VersionBrief
from controlplane.models import Evaluation, Run, Stage, Step

MAX_STEP = 2**31 - 1


class RunSerializer(serializers.ModelSerializer[Run]):
    """A run. `spec` is resolved: every default is filled in."""

    model = serializers.CharField(source="lineage.model.slug", read_only=True)
    head = VersionBrief(source="lineage.head", read_only=True, allow_null=True)
    parent_version = VersionBrief(source="lineage.parent", read_only=True, allow_null=True)
    created_by = serializers.CharField(source="created_by.username", read_only=True, default=None, allow_null=True)
    published_steps = serializers.IntegerField(read_only=True, default=0)
    topic = serializers.SerializerMethodField(help_text="of its events, for the websocket")

    class Meta:
        model = Run
        fields = [
            "id",
            "name",
            "state",
            "state_reason",
            "model",
            "lineage",
            "head",
            "parent_version",
            "published_steps",
            "checkpoint_step",
            "topic",
            "spec",
            "created_by",
            "created_at",
            "started_at",
            "finished_at",
        ]
        read_only_fields = fields

    def get_topic(self, run: Run) -> str:
        """The run's topic."""
        return f"run:{run.pk}"


class RunInput(Input):
    """A new run; `/runs/spec-schema` describes the spec."""

    name = serializers.CharField(max_length=200)
    spec = JSONObjectField()


class ForkInput(Input):
    """A new run from the weights after a step of this one."""

    name = serializers.CharField(max_length=200)
    step_number = serializers.IntegerField(min_value=0, max_value=MAX_STEP, help_text="0: before the first step")
    overrides = JSONObjectField(required=False, default=dict, help_text="merged into the spec")


class RunActionInput(ReasonInput):
    """Why the run is paused, resumed or stopped."""


class StageSerializer(serializers.ModelSerializer[Stage]):
    """A stage."""

    class Meta:
        model = Stage
        fields = ["id", "position", "kind", "state", "task_set", "rubric_version", "admitted_groups", "spec"]
        read_only_fields = fields


class StepSerializer(serializers.ModelSerializer[Step]):
    """An optimiser step."""

    stage = serializers.IntegerField(source="stage.position", read_only=True)
    base_version = VersionBrief(read_only=True)
    version = VersionBrief(read_only=True, allow_null=True)

    class Meta:
        model = Step
        fields = [
            "id",
            "number",
            "stage",
            "state",
            "base_version",
            "version",
            "metrics",
            "window",
            "created_at",
            "published_at",
        ]
        read_only_fields = fields


class EvaluationSerializer(serializers.ModelSerializer[Evaluation]):
    """An evaluation of one version."""

    version = VersionBrief(read_only=True)
    rubric_hash = serializers.CharField(source="rubric_version.content_hash", read_only=True)

    class Meta:
        model = Evaluation
        fields = [
            "id",
            "run",
            "version",
            "task_set",
            "rubric_version",
            "rubric_hash",
            "task_count",
            "temperature",
            "state",
            "mean_reward",
            "step_number",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields


class PointSerializer(serializers.Serializer[Any]):
    """One value of a series."""

    step = serializers.IntegerField(allow_null=True)
    at = serializers.DateTimeField()
    value = serializers.FloatField()


class SeriesSerializer(serializers.Serializer[Any]):
    """One named series, thinned to at most `points` values that keep its shape."""

    name = serializers.CharField()
    total = serializers.IntegerField(help_text="points before thinning")
    not_finite = serializers.IntegerField(help_text="points left out because they are infinite or no number")
    points = PointSerializer(many=True)


class MetricsSerializer(serializers.Serializer[Any]):
    """Series of a run."""

    run = serializers.UUIDField()
    series = SeriesSerializer(many=True)


class SpecSchemaSerializer(serializers.Serializer[Any]):
    """A JSON Schema document."""

    def to_representation(self, instance: Any) -> Any:
        """As it is."""
        return instance
