"""Clusters, replicas, versions, transfers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.serializers.base import Input, OptionalChoice, RequiredReasonInput, VersionBrief
from controlplane.api.serializers.lending import LoanSerializer
from controlplane.models import Cluster, Loan, PolicyVersion, Replica, ReplicaSlot, Transfer
from controlplane.services.enrolment import DEFAULT_LEASE_S, MAX_LEASE_S
from controlplane.states import DesiredSource, WeightSlot
from rl_core.types import ClusterRole

ROLE_CHOICES = [(role.value, role.value) for role in ClusterRole]
SLOT_CHOICES = [(slot.value, slot.value) for slot in WeightSlot]


class ClusterSerializer(serializers.ModelSerializer[Cluster]):
    """A cluster."""

    model = serializers.CharField(source="model.slug", read_only=True, default=None, allow_null=True)
    replica_count = serializers.IntegerField(read_only=True, default=0)

    class Meta:
        model = Cluster
        fields = [
            "id",
            "slug",
            "role",
            "region",
            "capacity",
            "bandwidth_bytes_s",
            "device",
            "devices",
            "dollars_device_hour",
            "local",
            "model",
            "replica_count",
            "created_at",
        ]
        read_only_fields = fields


class ClusterInput(Input):
    """A new cluster."""

    slug = serializers.SlugField(max_length=64)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    region = serializers.CharField(max_length=64)
    capacity = serializers.IntegerField(min_value=1, max_value=1_000_000)
    model = serializers.SlugField(max_length=64, required=False, allow_null=True, default=None)


class ClusterConfigureInput(RequiredReasonInput):
    """What changes; what is left out stays."""

    capacity = serializers.IntegerField(min_value=1, max_value=1_000_000, required=False)
    bandwidth_bytes_s = serializers.IntegerField(
        min_value=1, max_value=2**53, required=False, allow_null=True, help_text="null: no limit"
    )
    device = serializers.CharField(max_length=64, required=False, allow_blank=True, help_text="what engines run on")
    devices = serializers.IntegerField(min_value=1, max_value=10_000, required=False, help_text="of one replica")
    dollars_device_hour = serializers.FloatField(
        min_value=0, max_value=1_000_000, required=False, allow_null=True, help_text="null: not known"
    )


class SlotSerializer(serializers.ModelSerializer[ReplicaSlot]):
    """One resident weight set: desired and reported."""

    desired_version = VersionBrief(read_only=True, allow_null=True)
    current_version = VersionBrief(read_only=True, allow_null=True)
    desired_source = OptionalChoice(choices=DesiredSource.choices)

    class Meta:
        model = ReplicaSlot
        fields = [
            "slot",
            "desired_version",
            "desired_source",
            "desired_at",
            "desired_reason",
            "current_version",
            "current_root",
            "reported_at",
            "fault",
        ]
        read_only_fields = fields


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """An engine endpoint."""

    cluster = serializers.CharField(source="cluster.slug", read_only=True)
    slots = SlotSerializer(many=True, read_only=True)
    loan = serializers.SerializerMethodField(help_text="while it is lent")

    class Meta:
        model = Replica
        fields = [
            "id",
            "cluster",
            "name",
            "state",
            "inference_url",
            "control_url",
            "weight_slots",
            "slots",
            "metrics",
            "seen_at",
            "error",
            "lease_until",
            "drained_at",
            "drained_reason",
            "repairs",
            "repaired_at",
            "loan",
            "created_at",
        ]
        read_only_fields = fields

    @extend_schema_field(LoanSerializer(allow_null=True))
    def get_loan(self, replica: Replica) -> Any:
        """The loan that is not returned."""
        loans: list[Loan] = getattr(replica, "open_loans", [])
        return LoanSerializer(loans[0]).data if loans else None


class EnrolInput(Input):
    """An engine that registers itself: where its listeners are reached from the control plane."""

    name = serializers.SlugField(max_length=64)
    inference_url = serializers.CharField(max_length=300)
    control_url = serializers.CharField(max_length=300)
    weight_slots = serializers.IntegerField(min_value=1, max_value=len(WeightSlot), default=1)
    lease_s = serializers.IntegerField(min_value=1, max_value=MAX_LEASE_S, default=DEFAULT_LEASE_S)


class EnrolmentSerializer(serializers.Serializer[Any]):
    """The replica, and the bearer tokens that its listeners have to ask for."""

    replica = ReplicaSerializer()
    inference_token = serializers.CharField()
    control_token = serializers.CharField()
    peer_token = serializers.CharField(help_text="what replicas of the cluster ask of each other for segments")


class RenewInput(Input):
    """For how long, from now; 0 gives the lease up."""

    lease_s = serializers.IntegerField(min_value=0, max_value=MAX_LEASE_S, default=DEFAULT_LEASE_S)


class PinInput(RequiredReasonInput):
    """The version that a slot should hold until it is unpinned."""

    version = serializers.UUIDField()
    slot = serializers.ChoiceField(choices=SLOT_CHOICES, default=WeightSlot.DEFAULT.value)


class UnpinInput(RequiredReasonInput):
    """The slot that follows its cluster again."""

    slot = serializers.ChoiceField(choices=SLOT_CHOICES, default=WeightSlot.DEFAULT.value)


class VersionSerializer(serializers.ModelSerializer[PolicyVersion]):
    """A policy version."""

    ref = serializers.CharField(read_only=True, help_text="lineage:epoch-number")
    run = serializers.UUIDField(source="lineage.run.id", read_only=True, default=None, allow_null=True)
    parent = VersionBrief(read_only=True, allow_null=True)

    class Meta:
        model = PolicyVersion
        fields = [
            "id",
            "ref",
            "lineage",
            "run",
            "epoch",
            "number",
            "state",
            "parent",
            "root",
            "manifest_key",
            "snapshot_key",
            "delta_bytes",
            "full_bytes",
            "changed_elements",
            "elements",
            "created_at",
            "committed_at",
            "quarantined_at",
        ]
        read_only_fields = fields


class TransferSerializer(serializers.ModelSerializer[Transfer]):
    """One replica slot's move to one version."""

    cluster = serializers.CharField(source="replica.cluster.slug", read_only=True)
    replica_name = serializers.CharField(source="replica.name", read_only=True)
    version = VersionBrief(read_only=True)
    from_version = VersionBrief(read_only=True, allow_null=True)

    class Meta:
        model = Transfer
        fields = [
            "id",
            "cluster",
            "replica",
            "replica_name",
            "slot",
            "version",
            "from_version",
            "state",
            "fetched_bytes",
            "full_bytes",
            "repair",
            "phase",
            "done_bytes",
            "total_bytes",
            "bytes_per_s",
            "remaining_s",
            "hops",
            "timings",
            "error",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields
