"""Clusters, replicas, versions, transfers."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.api.serializers.base import Input, OptionalChoice, ReasonInput, VersionBrief
from controlplane.models import Cluster, PolicyVersion, Replica, ReplicaSlot, Transfer
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
        fields = ["id", "slug", "role", "region", "capacity", "local", "model", "replica_count", "created_at"]
        read_only_fields = fields


class ClusterInput(Input):
    """A new cluster."""

    slug = serializers.SlugField(max_length=64)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    region = serializers.CharField(max_length=64)
    capacity = serializers.IntegerField(min_value=1, max_value=1_000_000)
    model = serializers.SlugField(max_length=64, required=False, allow_null=True, default=None)


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
            "current_version",
            "current_root",
            "reported_at",
        ]
        read_only_fields = fields


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """An engine endpoint."""

    cluster = serializers.CharField(source="cluster.slug", read_only=True)
    slots = SlotSerializer(many=True, read_only=True)

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
            "created_at",
        ]
        read_only_fields = fields


class PinInput(ReasonInput):
    """The version that a slot should hold until it is unpinned."""

    version = serializers.UUIDField()
    slot = serializers.ChoiceField(choices=SLOT_CHOICES, default=WeightSlot.DEFAULT.value)


class UnpinInput(ReasonInput):
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
            "hops",
            "timings",
            "error",
            "created_at",
            "finished_at",
        ]
        read_only_fields = fields
