"""What senders of feedback send and get back, for the document: `controlplane.services.payloads` is what reads it."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import states
from controlplane.api.serializers.base import Input


class TargetInput(Input):
    """What the feedback is about."""

    kind = serializers.ChoiceField(choices=["generation", "episode", "message"])
    id = serializers.CharField(max_length=200)


class ActorInput(Input):
    """Who gave it."""

    hash = serializers.CharField(max_length=64, required=False, allow_blank=True)
    kind = serializers.ChoiceField(choices=["user", "expert", "system"], required=False)


class SentInput(Input):
    """What every event carries."""

    event_id = serializers.UUIDField()
    target = TargetInput()
    occurred_at = serializers.DateTimeField()
    actor = ActorInput(required=False)
    tags = serializers.DictField(child=serializers.CharField(max_length=200), required=False)
    consent = serializers.ChoiceField(choices=states.Consent.choices, required=False)
    dry_run = serializers.BooleanField(required=False)


class FeedbackInput(SentInput):
    """The body of one feedback event."""

    signal = serializers.CharField(max_length=64)
    value = serializers.JSONField(required=False)
    comment = serializers.CharField(max_length=10_000, required=False, allow_blank=True)
    demonstration = serializers.CharField(max_length=40_000, required=False, allow_null=True, allow_blank=True)


class FeedbackBatchInput(Input):
    """Up to 500 events."""

    items = FeedbackInput(many=True)


class ProductEventInput(SentInput):
    """The body of one product event: `event` has a `kind`, and what the kind's detector looks at."""

    event = serializers.JSONField()


class ProductEventBatchInput(Input):
    """Up to 500 product events."""

    items = ProductEventInput(many=True)


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
