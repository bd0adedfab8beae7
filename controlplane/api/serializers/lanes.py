"""Lanes, releases, generations, and the feedback on them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import states
from controlplane.api.serializers.base import Input, JSONObjectField, VersionBrief
from controlplane.models import (
    Feedback,
    FeedbackSource,
    Generation,
    Lane,
    RejectedPayload,
    ServedVersion,
    SignalDefinition,
    SignalMap,
)


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
    cluster = serializers.SlugField(max_length=64)
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


class SignalSerializer(serializers.ModelSerializer[SignalDefinition]):
    """A defined signal."""

    class Meta:
        model = SignalDefinition
        fields = ["id", "slug", "value_type", "minimum", "maximum", "categories", "created_at"]
        read_only_fields = fields


class SignalInput(Input):
    """A new signal."""

    slug = serializers.SlugField(max_length=64)
    value_type = serializers.ChoiceField(choices=states.SignalType.choices)
    minimum = serializers.FloatField(required=False, allow_null=True, default=None)
    maximum = serializers.FloatField(required=False, allow_null=True, default=None)
    categories = serializers.ListField(
        child=serializers.CharField(max_length=64), required=False, max_length=50, default=list
    )


class SignalMapSerializer(serializers.ModelSerializer[SignalMap]):
    """A version of the map from signals to reward."""

    author = serializers.CharField(source="author.username", read_only=True, default=None, allow_null=True)

    class Meta:
        model = SignalMap
        fields = ["id", "number", "content_hash", "content", "author", "created_at"]
        read_only_fields = fields


class SignalMapInput(Input):
    """A new version of the map."""

    content = JSONObjectField()


class SourceSerializer(serializers.ModelSerializer[FeedbackSource]):
    """A webhook source."""

    live_secrets = serializers.SerializerMethodField()

    class Meta:
        model = FeedbackSource
        fields = ["id", "slug", "trust_weight", "live_secrets", "unauthenticated_count", "disabled_at", "created_at"]
        read_only_fields = fields

    def get_live_secrets(self, source: FeedbackSource) -> int:
        """How many signing secrets are accepted now."""
        return len(source.sealed_secrets)


class SourceSecretSerializer(SourceSerializer):
    """A source with its new signing secret, which is shown this once."""

    secret = serializers.CharField(read_only=True, allow_null=True)

    class Meta(SourceSerializer.Meta):
        fields = [*SourceSerializer.Meta.fields, "secret"]
        read_only_fields = fields


class SourceInput(Input):
    """A new webhook source."""

    slug = serializers.SlugField(max_length=64)
    trust_weight = serializers.FloatField(min_value=0.01, max_value=100, required=False, default=1.0)


class FeedbackSerializer(serializers.ModelSerializer[Feedback]):
    """A stored feedback event."""

    signal = serializers.CharField(source="signal.slug", read_only=True)
    value = serializers.JSONField(read_only=True)

    class Meta:
        model = Feedback
        fields = [
            "id",
            "sender",
            "signal",
            "state",
            "target_kind",
            "target_id",
            "generation_id",
            "value",
            "actor_kind",
            "comment",
            "demonstration",
            "tags",
            "consent",
            "occurred_at",
            "created_at",
        ]
        read_only_fields = fields


class RejectedSerializer(serializers.ModelSerializer[RejectedPayload]):
    """A refused payload of an authenticated sender."""

    class Meta:
        model = RejectedPayload
        fields = ["id", "sender", "code", "detail", "body", "created_at", "replayed_at"]
        read_only_fields = fields


class TargetInput(Input):
    """What the feedback is about."""

    kind = serializers.ChoiceField(choices=["generation", "episode", "message"])
    id = serializers.CharField(max_length=200)


class ActorInput(Input):
    """Who gave it."""

    hash = serializers.CharField(max_length=64, required=False, allow_blank=True)
    kind = serializers.ChoiceField(choices=["user", "expert", "system"], required=False)


class FeedbackInput(Input):
    """The body of one feedback event, as `controlplane.services.feedback` reads it."""

    event_id = serializers.UUIDField()
    signal = serializers.CharField(max_length=64)
    target = TargetInput()
    value = serializers.JSONField(required=False)
    occurred_at = serializers.DateTimeField()
    actor = ActorInput(required=False)
    comment = serializers.CharField(max_length=10_000, required=False, allow_blank=True)
    demonstration = serializers.CharField(max_length=40_000, required=False, allow_null=True, allow_blank=True)
    tags = serializers.DictField(child=serializers.CharField(), required=False)
    consent = serializers.ChoiceField(choices=["train", "eval", "none"], required=False)
    dry_run = serializers.BooleanField(required=False)


class FeedbackBatchInput(Input):
    """Up to 500 events."""

    items = FeedbackInput(many=True)


class ReceiptSerializer(serializers.Serializer[Any]):
    """What became of an event."""

    id = serializers.UUIDField(allow_null=True)
    join = serializers.CharField()
    duplicate = serializers.BooleanField()


class BatchReceiptSerializer(serializers.Serializer[Any]):
    """What became of each event of a batch."""

    accepted = serializers.ListField(child=serializers.DictField())

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """`errors` is a name that serializers use themselves, so it cannot be a class attribute."""
        return {**super().get_fields(), "errors": serializers.ListField(child=serializers.DictField())}


class RetractionSerializer(serializers.Serializer[Any]):
    """A tombstone, and the versions that were trained on the event's generation."""

    id = serializers.UUIDField()
    trained_versions = serializers.ListField(child=serializers.CharField())
