"""Reads for the API: clusters, replicas, versions, transfers."""

from __future__ import annotations

from django.db.models import Count, Prefetch, QuerySet

from controlplane.models import Cluster, LendingPolicy, Loan, PolicyVersion, Project, Replica, Transfer
from controlplane.states import LoanState


def clusters_of(project: Project) -> QuerySet[Cluster]:
    """Clusters with how many replicas they have."""
    rows = Cluster.objects.filter(project=project).select_related("model")
    return rows.annotate(replica_count=Count("replicas"))


def replicas_of(project: Project) -> QuerySet[Replica]:
    """Replicas with their slots, and the loan that is not returned."""
    rows = Replica.objects.filter(cluster__project=project).select_related("cluster")
    open_loans = Loan.objects.exclude(state=LoanState.RETURNED).select_related("replica__cluster")
    loans = Prefetch("loans", queryset=open_loans, to_attr="open_loans")
    return rows.prefetch_related("slots__desired_version", "slots__current_version", loans)


def loans_of(project: Project) -> QuerySet[Loan]:
    """Hand-overs of replicas to rollouts."""
    return Loan.objects.filter(replica__cluster__project=project).select_related("replica__cluster")


def policies_of(project: Project) -> QuerySet[LendingPolicy]:
    """Lending policies of the project's clusters."""
    return LendingPolicy.objects.filter(cluster__project=project).select_related("cluster")


def versions_of(project: Project) -> QuerySet[PolicyVersion]:
    """Policy versions of all lineages."""
    rows = PolicyVersion.objects.filter(lineage__project=project)
    return rows.select_related("lineage__run", "parent")


def transfers_of(project: Project) -> QuerySet[Transfer]:
    """Transfers to the project's replicas."""
    rows = Transfer.objects.filter(replica__cluster__project=project)
    return rows.select_related("replica__cluster", "version", "from_version")
