"""Reads for the pages: when serving clusters lend, what they wait for, and every hand-over with its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import Cluster, LendingPolicy, Loan, Project
from controlplane.states import LoanState
from rl_core.lending import LendingSpec, LendingWindow, LoadSource, lending_parse
from rl_core.types import ClusterRole

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class LenderView:
    """A serving cluster with its policy, if it has one."""

    cluster: Cluster
    policy: LendingPolicy | None
    spec: LendingSpec | None
    lent: int

    @property
    def windows(self) -> list[str]:
        """Its windows as they are typed."""
        return [window_text(window) for window in self.spec.windows] if self.spec else []

    @property
    def watches_load(self) -> bool:
        """Whether it looks at its users' load."""
        return self.spec is not None and self.spec.source is not LoadSource.NONE


@dataclass(frozen=True, slots=True)
class LendingView:
    """Whether the project allows lending, its lenders, and the newest hand-overs, newest first."""

    allowed: bool
    lenders: list[LenderView]
    loans: list[Loan]


def lending_view(project: Project, size: int = 20) -> LendingView:
    """A project's lending, in three queries."""
    loans = Loan.objects.filter(replica__cluster__project=project).select_related("replica__cluster", "run")
    lent: dict[object, int] = {}
    for cluster_id in loans.exclude(state=LoanState.RETURNED).values_list("replica__cluster_id", flat=True):
        lent[cluster_id] = lent.get(cluster_id, 0) + 1
    clusters = Cluster.objects.filter(project=project, role=ClusterRole.SERVING.value)
    rows = clusters.select_related("lending").order_by("region", "slug")
    lenders = [_lender(cluster, lent.get(cluster.pk, 0)) for cluster in rows]
    allowed = Project.objects.filter(pk=project.pk, lending_allowed=True).exists()
    return LendingView(allowed, lenders, list(loans.order_by("-pk")[:size]))


def lender_of(cluster: Cluster) -> LenderView | None:
    """One cluster's lending; None for a cluster that serves nobody."""
    if cluster.role != ClusterRole.SERVING.value:
        return None
    return _lender(Cluster.objects.select_related("lending").get(pk=cluster.pk), 0)


def window_text(window: LendingWindow) -> str:
    """A window as people type it: `Mon,Tue 22:00-06:00`."""
    return f"{','.join(_DAYS[day] for day in sorted(set(window.days)))} {window.start}-{window.end}"


def _lender(cluster: Cluster, lent: int) -> LenderView:
    policy: LendingPolicy | None = getattr(cluster, "lending", None)
    spec = lending_parse(policy.spec) if policy is not None and policy.spec else None
    return LenderView(cluster, policy, spec, lent)
