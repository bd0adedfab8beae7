"""Lanes, generations, and what is done to a user's data."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, JSONObjectField, VersionBrief
from controlplane.models import Generation, Lane, ServedVersion


class LaneSerializer(serializers.ModelSerializer[Lane]):
    """A lane."""

    cluster = serializers.CharField(source="cluster.slug", read_only=True)
    model = serializers.CharField(source="model.slug", read_only=True)
    promoted_version = VersionBrief(read_only=True, allow_null=True)
    rollback_to = VersionBrief(read_only=True, allow_null=True)
    topic = serializers.SerializerMethodField(help_text="of its events, for the websocket")

    class Meta:
        model = Lane
        fields = [
            "id",
            "slug",
            "cluster",
            "model",
            "promoted_version",
            "approvals",
            "non_inferiority_margin",
            "next_slot_at",
            "paused_at",
            "hold_reason",
            "rollback_to",
            "revision",
            "system_prompt",
            "topic",
            "created_at",
        ]
        read_only_fields = fields

    def get_topic(self, lane: Lane) -> str:
        """The lane's topic."""
        return f"lane:{lane.pk}"


class LaneInput(Input):
    """A new lane."""

    slug = serializers.SlugField(max_length=64)
    cluster = serializers.SlugField(max_length=64, help_text="a serving cluster that no other lane has")
    model = serializers.SlugField(max_length=64)
    system_prompt = serializers.CharField(max_length=20_000, required=False, allow_blank=True, default="")
    approvals = serializers.IntegerField(min_value=0, max_value=20, required=False, default=1)
    non_inferiority_margin = serializers.FloatField(min_value=0, max_value=1, required=False, default=0.02)


class ServedSerializer(serializers.ModelSerializer[ServedVersion]):
    """What a lane served from `created_at` until `until`."""

    version = VersionBrief(read_only=True)

    class Meta:
        model = ServedVersion
        fields = ["id", "arm", "version", "release", "created_at", "until"]
        read_only_fields = fields


class TrainInput(Input):
    """A run on the lane's present window; `stage` replaces fields of the real-time stage."""

    name = serializers.CharField(max_length=200)
    stage = JSONObjectField(required=False, default=dict)


class EraseInput(Input):
    """Whose content is to be deleted, and why."""

    user = serializers.CharField(max_length=200)
    reason = serializers.CharField(max_length=500)


class ErasedSerializer(serializers.Serializer[Any]):
    """What an erasure did."""

    generations = serializers.IntegerField(help_text="generations whose content was deleted")


class GenerationSerializer(serializers.ModelSerializer[Generation]):
    """A generation's metadata; its content is kept only as far as consent goes."""

    lane = serializers.CharField(source="lane.slug", read_only=True)
    version = VersionBrief(read_only=True)
    has_content = serializers.SerializerMethodField()

    class Meta:
        model = Generation
        fields = [
            "id",
            "lane",
            "arm",
            "version",
            "session",
            "consent",
            "has_content",
            "trainable",
            "prompt_tokens",
            "sampled_tokens",
            "finish_reason",
            "latency_ms",
            "created_at",
            "erased_at",
        ]
        read_only_fields = fields

    def get_has_content(self, generation: Generation) -> bool:
        """Whether content is kept."""
        return bool(generation.content_key)


class WithdrawInput(Input):
    """Whose consent ends, and why."""

    user = serializers.CharField(max_length=200)
    reason = serializers.CharField(max_length=500)


class WithdrawnSerializer(serializers.Serializer[Any]):
    """What a withdrawal of consent reached."""

    generations = serializers.IntegerField(help_text="generations that nothing is trained on from now on")
    trained_versions = serializers.ListField(
        child=serializers.CharField(), help_text="versions that were trained on some of them"
    )
    in_training = serializers.IntegerField(help_text="of them, in the batch of a step that is under way")
