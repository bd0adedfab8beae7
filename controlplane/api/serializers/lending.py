"""Lending: policies of serving clusters, and each hand-over of a replica."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.api.serializers.base import JSONObjectField, OptionalChoice, RequiredReasonInput
from controlplane.models import LendingPolicy, Loan
from controlplane.states import DesiredSource


class LoanSerializer(serializers.ModelSerializer[Loan]):
    """One replica lent to one run's rollouts."""

    cluster = serializers.CharField(source="replica.cluster.slug", read_only=True)
    replica_name = serializers.CharField(source="replica.name", read_only=True)
    before_source = OptionalChoice(choices=DesiredSource.choices)

    class Meta:
        model = Loan
        fields = [
            "id",
            "cluster",
            "replica",
            "replica_name",
            "run",
            "state",
            "slot",
            "sessions",
            "by_hand",
            "reason",
            "before_version",
            "before_source",
            "created_at",
            "returning_at",
            "return_reason",
            "return_by",
            "returned_at",
        ]
        read_only_fields = fields


class LendingPolicySerializer(serializers.ModelSerializer[LendingPolicy]):
    """When a cluster lends, the load that was seen last, and what the policy waits for."""

    cluster = serializers.CharField(source="cluster.slug", read_only=True)
    spec = serializers.JSONField(read_only=True, help_text="as `/lending-schema` says, resolved")

    class Meta:
        model = LendingPolicy
        fields = ["cluster", "enabled", "spec", "load", "load_at", "load_error", "quiet_since", "note", "created_at"]
        read_only_fields = fields


class LendingPolicyInput(RequiredReasonInput):
    """A new policy. Turned off, only a person lends."""

    spec = JSONObjectField()
    enabled = serializers.BooleanField(default=True)


class LendingAllowedInput(RequiredReasonInput):
    """Whether rollouts may run on replicas that serve users."""

    allowed = serializers.BooleanField()


class LendInput(RequiredReasonInput):
    """The run whose rollouts the replica is lent to."""

    run = serializers.UUIDField()
