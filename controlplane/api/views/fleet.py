"""Clusters, replicas, versions, transfers."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import ClusterFilter, ReplicaFilter, TransferFilter, VersionFilter
from controlplane.api.serializers.fleet import (
    ClusterInput,
    ClusterSerializer,
    PinInput,
    ReplicaSerializer,
    TransferSerializer,
    UnpinInput,
    VersionSerializer,
)
from controlplane.errors import Conflict, Invalid
from controlplane.models import Cluster, PolicyVersion, Replica, Transfer
from controlplane.permissions import Action
from controlplane.selectors import api_fleet as select
from controlplane.selectors.api_catalog import models_of
from controlplane.services import fleet
from controlplane.states import DesiredSource, WeightSlot
from rl_core.types import ClusterRole


class ClusterList(Post, ListView):
    """Clusters."""

    actions = {"GET": Action.READ, "POST": Action.FLEET_CONTROL}
    serializer_class = ClusterSerializer
    input_serializer = ClusterInput
    filterset_class = ClusterFilter

    def rows(self) -> QuerySet[Cluster]:
        """Clusters."""
        return select.clusters_of(self.project)

    def perform(self, data: dict[str, Any]) -> Cluster:
        """Add a cluster."""
        slug = data.pop("model")
        model = models_of(self.project).filter(slug=slug).first() if slug else None
        if slug and model is None:
            raise Invalid("there is no such model in this project", "model")
        role = ClusterRole(data.pop("role"))
        return fleet.cluster_create(project=self.project, role=role, model=model, actor=self.actor, **data)


class ClusterDetail(DetailView):
    """One cluster."""

    serializer_class = ClusterSerializer

    def row(self) -> Cluster:
        """The cluster of the path."""
        cluster: Cluster = one(select.clusters_of(self.project), "cluster", slug=self.kwargs["slug"])
        return cluster


class ReplicaList(ListView):
    """Replicas of all clusters, with what their slots should hold and do hold."""

    serializer_class = ReplicaSerializer
    filterset_class = ReplicaFilter

    def rows(self) -> QuerySet[Replica]:
        """Replicas."""
        return select.replicas_of(self.project)


class ReplicaDetail(DetailView):
    """One replica."""

    serializer_class = ReplicaSerializer

    def row(self) -> Replica:
        """The replica of the path."""
        replica: Replica = one(select.replicas_of(self.project), "replica", pk=self.kwargs["id"])
        return replica


class _SlotAction(ActionView):
    """An action on one slot of a replica; answers with the replica."""

    actions = {"POST": Action.FLEET_CONTROL}
    serializer_class = ReplicaSerializer

    def replica_and_slot(self, data: dict[str, Any]) -> tuple[Replica, WeightSlot]:
        """Raises: NotFound, Invalid when the replica has no such slot."""
        replica: Replica = one(select.replicas_of(self.project), "replica", pk=self.kwargs["id"])
        slot = WeightSlot(data["slot"])
        if not replica.slots.filter(slot=slot.value).exists():
            raise Invalid(f"replica {replica.name} has no slot {slot.value}", "slot")
        return replica, slot

    def again(self, replica: Replica) -> Replica:
        """The replica as it is now."""
        fresh: Replica = select.replicas_of(self.project).get(pk=replica.pk)
        return fresh


class ReplicaPin(_SlotAction):
    """Make a slot hold one version until it is unpinned."""

    input_serializer = PinInput

    def perform(self, data: dict[str, Any]) -> Replica:
        """Pin it."""
        replica, slot = self.replica_and_slot(data)
        version = select.versions_of(self.project).filter(pk=data["version"]).first()
        if version is None:
            raise Invalid("there is no such version in this project", "version")
        fleet.slot_target(
            replica=replica,
            slot=slot,
            version=version,
            source=DesiredSource.PINNED,
            actor=self.actor,
            reason=data["reason"],
        )
        return self.again(replica)


class ReplicaUnpin(_SlotAction):
    """Let a pinned slot go: whoever drives its cluster says what it holds next."""

    input_serializer = UnpinInput

    def perform(self, data: dict[str, Any]) -> Replica:
        """Unpin it."""
        replica, slot = self.replica_and_slot(data)
        if replica.slots.get(slot=slot.value).desired_source != DesiredSource.PINNED:
            raise Conflict(f"slot {slot.value} of {replica.name} is not pinned")
        fleet.slot_target(
            replica=replica, slot=slot, version=None, source=None, actor=self.actor, reason=data["reason"]
        )
        return self.again(replica)


class VersionList(ListView):
    """Policy versions of all lineages."""

    serializer_class = VersionSerializer
    filterset_class = VersionFilter

    def rows(self) -> QuerySet[PolicyVersion]:
        """Versions."""
        return select.versions_of(self.project)


class VersionDetail(DetailView):
    """One policy version."""

    serializer_class = VersionSerializer

    def row(self) -> PolicyVersion:
        """The version of the path."""
        version: PolicyVersion = one(select.versions_of(self.project), "version", pk=self.kwargs["id"])
        return version


class TransferList(ListView):
    """Movements of weights to replicas."""

    serializer_class = TransferSerializer
    filterset_class = TransferFilter

    def rows(self) -> QuerySet[Transfer]:
        """Transfers."""
        return select.transfers_of(self.project)


class TransferDetail(DetailView):
    """One transfer."""

    serializer_class = TransferSerializer

    def row(self) -> Transfer:
        """The transfer of the path."""
        transfer: Transfer = one(select.transfers_of(self.project), "transfer", pk=self.kwargs["id"])
        return transfer
