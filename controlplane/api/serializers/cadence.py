"""A lane's cadence and its slots."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, JSONObjectField
from controlplane.api.serializers.releases import MAX_REVISION
from controlplane.models import CadenceSlot


class CadenceSlotSerializer(serializers.ModelSerializer[CadenceSlot]):
    """One turn of the cadence. `reason` says what it waits for, or why it ended as it did."""

    class Meta:
        model = CadenceSlot
        fields = [
            "id",
            "number",
            "state",
            "reason",
            "due_at",
            "deadline_at",
            "run",
            "release",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields


class CadenceSerializer(serializers.Serializer[Any]):
    """The cadence as it is, and what it comes to: slots are never closer than 95 % of feedback needs to arrive."""

    cadence = serializers.JSONField(help_text="as `/cadence-schema` says, resolved; empty: releases by hand alone")
    revision = serializers.IntegerField(help_text="of the lane, for `expected_revision`")
    next_slot_at = serializers.DateTimeField(allow_null=True)
    paused_at = serializers.DateTimeField(allow_null=True)
    hold_reason = serializers.CharField(allow_blank=True)
    frozen_until = serializers.DateTimeField(allow_null=True)
    interval_s = serializers.FloatField()
    interval_effective_s = serializers.FloatField()
    feedback_delay_p50_s = serializers.FloatField(allow_null=True)
    feedback_delay_p95_s = serializers.FloatField(allow_null=True)
    feedback_delays = serializers.IntegerField(help_text="events that the delays were measured on")
    slot = CadenceSlotSerializer(allow_null=True, help_text="the one under way")


class LaneActionInput(Input):
    """Why, and which revision of the lane was seen."""

    reason = serializers.CharField(max_length=500)
    expected_revision = serializers.IntegerField(min_value=1, max_value=MAX_REVISION, required=False, default=None)


class CadenceInput(LaneActionInput):
    """A new cadence; an empty one turns it off."""

    cadence = JSONObjectField()


class LaneRollbackInput(LaneActionInput):
    """The version that is to answer again."""

    version = serializers.UUIDField()
