"""Signals, their map, sources, and feedback as it is shown."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import states
from controlplane.api.serializers.base import Input, JSONObjectField, ReasonInput
from controlplane.models import Feedback, FeedbackSource, RejectedPayload, SignalDefinition, SignalMap

MAX_RATE = 100_000_000


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


class DetectedSignalsSerializer(serializers.Serializer[Any]):
    """The signals that product events are read as."""

    signals = SignalSerializer(many=True)


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
    """A source of feedback."""

    live_secrets = serializers.SerializerMethodField()

    class Meta:
        model = FeedbackSource
        fields = [
            "id",
            "slug",
            "trust_weight",
            "rate_per_minute",
            "actor_rate_per_minute",
            "live_secrets",
            "unauthenticated_count",
            "disabled_at",
            "created_at",
        ]
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
    """A new source."""

    slug = serializers.SlugField(max_length=64)
    trust_weight = serializers.FloatField(min_value=0.01, max_value=100, required=False, default=1.0)
    rate_per_minute = serializers.IntegerField(min_value=1, max_value=MAX_RATE, required=False)
    actor_rate_per_minute = serializers.IntegerField(min_value=1, max_value=MAX_RATE, required=False)


class SourceChangeInput(ReasonInput):
    """What to change of a source; what is left out stays."""

    trust_weight = serializers.FloatField(min_value=0.01, max_value=100, required=False)
    rate_per_minute = serializers.IntegerField(min_value=1, max_value=MAX_RATE, required=False)
    actor_rate_per_minute = serializers.IntegerField(min_value=1, max_value=MAX_RATE, required=False)
    disabled = serializers.BooleanField(required=False)


class SourceKeyInput(Input):
    """A name for a source's new key."""

    name = serializers.CharField(max_length=200)


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
        fields = ["id", "sender", "kind", "code", "detail", "body", "created_at", "replayed_at"]
        read_only_fields = fields


class RetractionSerializer(serializers.Serializer[Any]):
    """A tombstone, and the versions that were trained on what the event was about."""

    id = serializers.UUIDField()
    trained_versions = serializers.ListField(child=serializers.CharField())


class IntakeSerializer(serializers.Serializer[Any]):
    """What came in. Rates are null while there is nothing to divide by."""

    received = serializers.IntegerField(help_text="different events")
    repeats = serializers.IntegerField(help_text="events that were sent again")
    states = serializers.DictField(child=serializers.IntegerField(), help_text="events by state")
    orphan_rate = serializers.FloatField(allow_null=True, help_text="share that never found its generation")
    late_rate = serializers.FloatField(allow_null=True, help_text="share of the joined that came after their horizon")
    duplicate_rate = serializers.FloatField(allow_null=True, help_text="share of deliveries that repeat another")


class SenderIntakeSerializer(IntakeSerializer):
    """What came in of one sender."""

    sender = serializers.CharField()


class DelaySerializer(serializers.Serializer[Any]):
    """Seconds between an answer and the arrival of feedback on it."""

    p50 = serializers.FloatField(allow_null=True)
    p95 = serializers.FloatField(allow_null=True)
    n = serializers.IntegerField()


class FeedbackHealthSerializer(serializers.Serializer[Any]):
    """How well feedback comes in."""

    total = IntakeSerializer()
    senders = SenderIntakeSerializer(many=True)
    delays = DelaySerializer()
