"""Reads for the pages: clusters by region, their replicas, what they hold, how far they lag, what may be done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, ClassVar

from django.db.models import OuterRef, Subquery, Sum
from django.utils import timezone

from controlplane.models import Cluster, Loan, PolicyVersion, Project, Replica, ReplicaSlot, Transfer
from controlplane.services.steering import MAX_REPAIRS
from controlplane.states import FOLLOWING, DesiredSource, LoanState, ReplicaState, TransferState, VersionState
from rl_core.types import ClusterRole

_DAY = timedelta(days=1)
_ANSWERING = frozenset({ReplicaState.READY, ReplicaState.RECONCILING})


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot with its lag behind `wanted`: its lineage's head now where it follows a training head, else its wish."""

    slot: ReplicaSlot
    wanted: PolicyVersion | None
    lag_versions: int | None  # None: nothing wanted, or another lineage or epoch
    lag_s: float | None  # since the first version newer than what it holds was committed; else since the wish
    last: Transfer | None

    @property
    def current(self) -> bool:
        """Whether the slot holds what it should."""
        return self.slot.current_version == self.wanted

    @property
    def ahead(self) -> int:
        """By how many versions it is past what it should hold: on its way back."""
        return max(0, -(self.lag_versions or 0))

    @property
    def pinned(self) -> bool:
        """Whether a person said what it holds."""
        return self.slot.desired_source == DesiredSource.PINNED

    @property
    def pause_s(self) -> float | None:
        """How long generation stood still at the last swap."""
        return self.last.timings.get("pause_s") if self.last else None


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica with its slots, and its loan while it is not returned."""

    replica: Replica
    slots: list[SlotView]
    metrics: list[tuple[str, Any]]
    loan: Loan | None = None
    lends: bool = False  # its cluster serves users, and the project allows lending
    most_repairs: ClassVar[int] = MAX_REPAIRS

    @property
    def waits_for_person(self) -> bool:
        """Whether something of it is faulty and no repair is tried by itself any more."""
        return self.faulty and self.replica.repairs >= MAX_REPAIRS

    @property
    def faulty(self) -> bool:
        """Whether a slot, or all of it, is not trusted."""
        return self.replica.state == ReplicaState.POISONED or any(view.slot.fault for view in self.slots)

    @property
    def lease_over(self) -> bool:
        """Whether it registered itself and did not renew in time."""
        until = self.replica.lease_until
        return until is not None and until <= timezone.now()

    @property
    def answers(self) -> bool:
        """Whether it was given requests at the last look."""
        return self.replica.state in _ANSWERING

    @property
    def notes(self) -> bool:
        """Whether there is more to say of it than its state."""
        known = self.replica
        told = known.error or known.repairs or known.drained_at or known.lease_until or self.loan
        poisoned = known.state == ReplicaState.POISONED
        return bool(told) or poisoned or any(view.slot.fault or view.pinned for view in self.slots)

    @property
    def forgettable(self) -> bool:
        """Whether it is gone: nobody here starts it, and nothing says that it is there."""
        gone = self.replica.state == ReplicaState.OFFLINE and (self.lease_over or self.replica.lease_until is None)
        return gone and not self.replica.cluster.local

    @property
    def acts(self) -> list[str]:
        """What somebody who controls the fleet may ask of it now."""
        pinned = any(view.pinned for view in self.slots)
        found = ["pin"] if self.slots else []
        found += ["unpin"] if pinned else []
        found.append("drain" if self.replica.drained_at is None else "undrain")
        found += ["repair"] if self.replica.state != ReplicaState.OFFLINE else []
        found += ["forget"] if self.forgettable else []
        if self.loan is not None:
            found += ["return"] if self.loan.state == LoanState.LENT else []
        elif self.lends and len(self.slots) > 1:
            found.append("lend")
        return found


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster with its replicas and what it received in the last day."""

    cluster: Cluster
    replicas: list[ReplicaView]
    fetched_bytes: int
    full_bytes: int

    @property
    def measures(self) -> bool:
        """Whether any of its engines told a figure."""
        return any(replica.metrics for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class RegionView:
    """The clusters of one region."""

    name: str
    clusters: list[ClusterView]

    @property
    def replicas(self) -> list[ReplicaView]:
        """All of the region."""
        return [replica for view in self.clusters for replica in view.replicas]


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """The whole fleet in numbers."""

    replicas: int
    answering: int
    out: list[tuple[str, int]]  # states of those that do not answer, and of how many
    slots: int  # that should hold something
    in_step: int
    behind_versions: int
    behind_s: float | None
    lent: int
    fetched_bytes: int
    full_bytes: int


def lag_in_versions(current: PolicyVersion | None, desired: PolicyVersion | None) -> int | None:
    """Versions between two of one lineage and epoch; None where the question has no answer."""
    if current is None or desired is None or not _same_chain(current, desired):
        return None
    return desired.number - current.number


def _same_chain(current: PolicyVersion | None, desired: PolicyVersion) -> bool:
    return current is not None and (current.lineage_id, current.epoch) == (desired.lineage_id, desired.epoch)


def clusters_view(project: Project) -> list[ClusterView]:
    """A project's clusters with everything their page shows, in six queries however many they are."""
    now = timezone.now()
    last = _last_transfers(project)
    loans = {loan.replica_id: loan for loan in _open_loans(project)}
    slots: dict[Any, list[SlotView]] = {}
    rows = ReplicaSlot.objects.filter(replica__cluster__project=project).annotate(newer_at=_newer_at())
    for slot in rows.select_related("current_version", "desired_version__lineage__head").order_by("-slot"):
        view = _slot_view(slot, slot.newer_at, last.get((slot.replica_id, slot.slot)), now)
        slots.setdefault(slot.replica_id, []).append(view)
    replicas: dict[Any, list[ReplicaView]] = {}
    for replica in Replica.objects.filter(cluster__project=project).select_related("cluster").order_by("name"):
        metrics = [(key, value) for key, value in sorted(replica.metrics.items()) if isinstance(value, int | float)]
        lends = project.lending_allowed and replica.cluster.role == ClusterRole.SERVING.value
        seen = ReplicaView(replica, slots.get(replica.pk, []), metrics, loans.get(replica.pk), lends)
        replicas.setdefault(replica.cluster_id, []).append(seen)
    traffic = _traffic(project, now)
    return [
        ClusterView(cluster, replicas.get(cluster.pk, []), *traffic.get(cluster.pk, (0, 0)))
        for cluster in Cluster.objects.filter(project=project).select_related("model").order_by("role", "slug")
    ]


def regions_of(views: list[ClusterView]) -> list[RegionView]:
    """The clusters by region, in the order of their names."""
    ordered = sorted(views, key=lambda view: (view.cluster.region, view.cluster.role, view.cluster.slug))
    return [RegionView(name, list(group)) for name, group in groupby(ordered, key=lambda view: view.cluster.region)]


def totals_of(views: list[ClusterView]) -> FleetTotals:
    """What all clusters come to."""
    replicas = [replica for view in views for replica in view.replicas]
    slots = [slot for replica in replicas for slot in replica.slots if slot.slot.desired_version_id is not None]
    late = [slot for slot in slots if not slot.current]
    return FleetTotals(
        replicas=len(replicas),
        answering=sum(replica.answers for replica in replicas),
        out=sorted(Counter(replica.replica.state for replica in replicas if not replica.answers).items()),
        slots=len(slots),
        in_step=len(slots) - len(late),
        behind_versions=max((abs(slot.lag_versions or 0) for slot in late), default=0),
        behind_s=max((slot.lag_s for slot in late if slot.lag_s is not None), default=None),
        lent=sum(replica.loan is not None for replica in replicas),
        fetched_bytes=sum(view.fetched_bytes for view in views),
        full_bytes=sum(view.full_bytes for view in views),
    )


def _slot_view(slot: ReplicaSlot, newer_at: datetime | None, last: Transfer | None, now: datetime) -> SlotView:
    wanted, since = slot.desired_version, slot.desired_at
    if wanted is not None and slot.desired_source in FOLLOWING:
        wanted = wanted.lineage.head or wanted
        since = (newer_at if _same_chain(slot.current_version, wanted) else None) or since
    waiting = wanted is not None and wanted != slot.current_version
    lag_s = (now - since).total_seconds() if waiting and since else None
    return SlotView(slot, wanted, lag_in_versions(slot.current_version, wanted), lag_s, last)


def _newer_at() -> Subquery:
    """For rows of slots: when the first version after the one held was committed."""
    newer = PolicyVersion.objects.filter(
        lineage=OuterRef("current_version__lineage"),
        epoch=OuterRef("current_version__epoch"),
        number__gt=OuterRef("current_version__number"),
        state=VersionState.COMMITTED,
    )
    return Subquery(newer.order_by("number").values("committed_at")[:1])


def _open_loans(project: Project) -> list[Loan]:
    rows = Loan.objects.exclude(state=LoanState.RETURNED).filter(replica__cluster__project=project)
    return list(rows.select_related("run"))


def _last_transfers(project: Project) -> dict[tuple[Any, str], Transfer]:
    done = (
        Transfer.objects.filter(replica__cluster__project=project, state=TransferState.DONE)
        .order_by("replica_id", "slot", "-created_at")
        .distinct("replica_id", "slot")
    )
    return {(transfer.replica_id, transfer.slot): transfer for transfer in done}


def _traffic(project: Project, now: datetime) -> dict[Any, tuple[int, int]]:
    """By cluster: bytes fetched in the last day, and what the same moves would have been as full weights."""
    rows = (
        Transfer.objects.filter(replica__cluster__project=project, state=TransferState.DONE, created_at__gte=now - _DAY)
        .values("replica__cluster_id")
        .annotate(fetched=Sum("fetched_bytes"), full=Sum("full_bytes"))
    )
    return {row["replica__cluster_id"]: (row["fetched"] or 0, row["full"] or 0) for row in rows}
