"""Clusters, replicas, versions, transfers."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import ClusterFilter, ReplicaFilter, TransferFilter, VersionFilter
from controlplane.api.serializers.fleet import (
    ClusterConfigureInput,
    ClusterInput,
    ClusterSerializer,
    ReplicaSerializer,
    TransferSerializer,
    VersionSerializer,
)
from controlplane.errors import Invalid
from controlplane.models import Cluster, PolicyVersion, Replica, Transfer
from controlplane.permissions import Action
from controlplane.selectors import api_fleet as select
from controlplane.selectors.api_catalog import models_of
from controlplane.services import fleet
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


class ClusterConfigure(ActionView):
    """Change what a cluster may run at once, or what transfers to it may take of its link."""

    actions = {"POST": Action.FLEET_CONTROL}
    serializer_class = ClusterSerializer
    input_serializer = ClusterConfigureInput

    def perform(self, data: dict[str, Any]) -> Cluster:
        """Change it."""
        cluster: Cluster = one(select.clusters_of(self.project), "cluster", slug=self.kwargs["slug"])
        fleet.cluster_configure(cluster=cluster, actor=self.actor, **data)
        fresh: Cluster = select.clusters_of(self.project).get(pk=cluster.pk)
        return fresh


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
