"""Groups, rollouts, scores, trajectories."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import OptionalChoice, VersionBrief
from controlplane.models import CriterionScore, Rollout, RolloutGroup
from rl_core.types import Ending, Fault, Role

ENDING_CHOICES = [(ending.value, ending.value) for ending in Ending]
FAULT_CHOICES = [(fault.value, fault.value) for fault in Fault]
ROLE_CHOICES = [(role.value, role.value) for role in Role]


class GroupSerializer(serializers.ModelSerializer[RolloutGroup]):
    """A rollout group."""

    task_key = serializers.CharField(source="task.key", read_only=True)
    step = serializers.IntegerField(source="step.number", read_only=True, default=None, allow_null=True)
    admitted_version = VersionBrief(read_only=True)
    oldest_version = VersionBrief(read_only=True, allow_null=True)

    class Meta:
        model = RolloutGroup
        fields = [
            "id",
            "run",
            "stage",
            "evaluation",
            "step",
            "task",
            "task_key",
            "purpose",
            "state",
            "position",
            "size",
            "seed",
            "admitted_version",
            "oldest_version",
            "mean_reward",
            "reason",
            "created_at",
            "started_at",
            "finished_at",
        ]
        read_only_fields = fields


class ScoreSerializer(serializers.ModelSerializer[CriterionScore]):
    """What one criterion gave. An error is never a value."""

    class Meta:
        model = CriterionScore
        fields = ["criterion", "value", "reason", "error", "rubric_version", "rubric_hash", "created_at"]
        read_only_fields = fields


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """One attempt at a task."""

    run = serializers.UUIDField(source="group.run_id", read_only=True, allow_null=True)
    replica = serializers.CharField(source="replica.name", read_only=True, default=None, allow_null=True)
    oldest_version = VersionBrief(read_only=True, allow_null=True)
    newest_version = VersionBrief(read_only=True, allow_null=True)
    ending = OptionalChoice(choices=ENDING_CHOICES)
    fault = OptionalChoice(choices=FAULT_CHOICES)
    scores = ScoreSerializer(many=True, read_only=True)

    class Meta:
        model = Rollout
        fields = [
            "id",
            "group",
            "run",
            "attempt",
            "state",
            "replica",
            "oldest_version",
            "newest_version",
            "turns",
            "sampled_tokens",
            "prompt_tokens",
            "ending",
            "fault",
            "error",
            "reward",
            "scores",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields


class MessageSerializer(serializers.Serializer[Any]):
    """One message; `segment`, `start`, `end` say which tokens it is."""

    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    content = serializers.CharField()
    parent = serializers.IntegerField()  # type: ignore[assignment]
    name = serializers.CharField()
    segment = serializers.IntegerField()
    start = serializers.IntegerField()
    end = serializers.IntegerField()


class SpanSerializer(serializers.Serializer[Any]):
    """Tokens `[start, end)` that one version sampled."""

    start = serializers.IntegerField()
    end = serializers.IntegerField()
    version = serializers.CharField()


class RoutesSerializer(serializers.Serializer[Any]):
    """Shape of the recorded experts; their bytes stay in the store."""

    tokens = serializers.IntegerField()
    layers = serializers.IntegerField()
    top_k = serializers.IntegerField()
    dtype = serializers.CharField()


class SegmentSerializer(serializers.Serializer[Any]):
    """One context window, token by token. All lists have the same length."""

    token_ids = serializers.ListField(child=serializers.IntegerField())
    loss_mask = serializers.ListField(child=serializers.IntegerField())
    logprobs = serializers.ListField(child=serializers.FloatField())
    spans = SpanSerializer(many=True)
    sampling = serializers.DictField()
    routes = RoutesSerializer(allow_null=True)


class ToolCallSerializer(serializers.Serializer[Any]):
    """One call of a tool."""

    tool = serializers.CharField()
    arguments = serializers.CharField()
    result = serializers.CharField()
    ok = serializers.BooleanField()
    turn = serializers.IntegerField()


class TrajectorySerializer(serializers.Serializer[Any]):
    """A whole rollout, token by token."""

    rollout = serializers.UUIDField()
    task_id = serializers.CharField()
    messages = MessageSerializer(many=True)
    segments = SegmentSerializer(many=True)
    tool_calls = ToolCallSerializer(many=True)
    ending = serializers.ChoiceField(choices=ENDING_CHOICES, allow_null=True)
    artifacts = serializers.DictField(child=serializers.CharField())
