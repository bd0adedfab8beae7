"""Events, units of work, attempts."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import ReasonInput
from controlplane.models import Attempt, Event, WorkUnit


class EventSerializer(serializers.ModelSerializer[Event]):
    """A record of the event log."""

    topic = serializers.CharField(source="topic_id", read_only=True)

    class Meta:
        model = Event
        fields = ["id", "topic", "seq", "type", "at", "actor_kind", "actor", "reason", "data"]
        read_only_fields = fields


class EnvelopeSerializer(serializers.Serializer[Any]):
    """An event as the websocket sends it; `data` also names actor and reason."""

    v = serializers.IntegerField()
    topic = serializers.CharField()
    seq = serializers.IntegerField()
    type = serializers.CharField()
    ts = serializers.DateTimeField()
    data = serializers.DictField()  # type: ignore[assignment]


class EventsAfterSerializer(serializers.Serializer[Any]):
    """Events of a topic after `after`, in order and without a gap."""

    topic = serializers.CharField()
    seq = serializers.IntegerField(help_text="the topic's newest seq")
    next_after = serializers.IntegerField(help_text="ask again after this one")
    results = EnvelopeSerializer(many=True)


class WorkSerializer(serializers.ModelSerializer[WorkUnit]):
    """A unit of work."""

    class Meta:
        model = WorkUnit
        fields = [
            "id",
            "kind",
            "ref",
            "run",
            "state",
            "fence",
            "failures",
            "max_failures",
            "worker",
            "lease_until",
            "next_send_at",
            "sends",
            "error_code",
            "error",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields


class AttemptSerializer(serializers.ModelSerializer[Attempt]):
    """One try at a unit."""

    kind = serializers.CharField(source="unit.kind", read_only=True)

    class Meta:
        model = Attempt
        fields = [
            "id",
            "unit",
            "kind",
            "number",
            "worker",
            "state",
            "error_code",
            "error",
            "traceback",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields


class ReplayInput(ReasonInput):
    """Why a dead letter is tried again."""
