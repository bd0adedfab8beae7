"""Alerts, the hooks that they are posted to, and their deliveries."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.api.serializers.base import Input
from controlplane.models import Alert, AlertDelivery, AlertHook


class AlertSerializer(serializers.ModelSerializer[Alert]):
    """Something that a person has to look at. One that holds keeps its lane's cadence still until it is resolved."""

    lane = serializers.CharField(source="lane.slug", read_only=True, default=None, allow_null=True)
    detail = serializers.JSONField(read_only=True)
    resolved_by = serializers.CharField(source="resolved_by.username", read_only=True, default=None, allow_null=True)

    class Meta:
        model = Alert
        fields = [
            "id",
            "lane",
            "kind",
            "subject",
            "detail",
            "holds",
            "created_at",
            "resolved_at",
            "resolved_by",
            "resolution",
        ]
        read_only_fields = fields


class ResolveInput(Input):
    """What was found."""

    reason = serializers.CharField(max_length=500)


class HookSerializer(serializers.ModelSerializer[AlertHook]):
    """Where alerts are posted, signed as Standard Webhooks says."""

    url = serializers.CharField(source="shown", read_only=True, help_text="its host; the rest may be a secret")

    class Meta:
        model = AlertHook
        fields = ["id", "url", "created_at", "disabled_at"]
        read_only_fields = fields


class HookSecretSerializer(HookSerializer):
    """The answer to a hook's creation: the only one that holds its secret. A replay of the call holds null."""

    secret = serializers.CharField(read_only=True, allow_null=True)

    class Meta(HookSerializer.Meta):
        fields = [*HookSerializer.Meta.fields, "secret"]
        read_only_fields = fields


class HookInput(Input):
    """A new hook."""

    url = serializers.CharField(max_length=500)


class DeliverySerializer(serializers.ModelSerializer[AlertDelivery]):
    """One alert on its way to one hook; its unit of work has the attempts."""

    class Meta:
        model = AlertDelivery
        fields = ["id", "alert", "hook", "status", "created_at", "delivered_at"]
        read_only_fields = fields
