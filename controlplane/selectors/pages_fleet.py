"""Reads for the pages: clusters, replicas, what they hold, how far they lag, what was sent to them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Sum
from django.utils import timezone

from controlplane.models import Cluster, PolicyVersion, Project, Replica, ReplicaSlot, Transfer
from controlplane.states import TransferState

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot with its lag behind what it should hold."""

    slot: ReplicaSlot
    lag_versions: int | None  # None: nothing desired, or another lineage or epoch
    lag_s: float | None  # since the wish, while it is not fulfilled
    last: Transfer | None

    @property
    def current(self) -> bool:
        """Whether the slot holds what it should."""
        return self.slot.current_version_id == self.slot.desired_version_id

    @property
    def pause_s(self) -> float | None:
        """How long generation stood still at the last swap."""
        return self.last.timings.get("pause_s") if self.last else None


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica with its slots."""

    replica: Replica
    slots: list[SlotView]
    metrics: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster with its replicas and what it received in the last day."""

    cluster: Cluster
    replicas: list[ReplicaView]
    fetched_bytes: int
    full_bytes: int


def lag_in_versions(current: PolicyVersion | None, desired: PolicyVersion | None) -> int | None:
    """Versions between two of one lineage and epoch; None where the question has no answer."""
    if current is None or desired is None:
        return None
    if (current.lineage_id, current.epoch) != (desired.lineage_id, desired.epoch):
        return None
    return desired.number - current.number


def clusters_view(project: Project) -> list[ClusterView]:
    """A project's clusters with everything their page shows, in five queries however many they are."""
    now = timezone.now()
    last = _last_transfers(project)
    slots: dict[Any, list[SlotView]] = {}
    rows = ReplicaSlot.objects.filter(replica__cluster__project=project).select_related(
        "current_version", "desired_version"
    )
    for slot in rows.order_by("-slot"):
        view = _slot_view(slot, last.get((slot.replica_id, slot.slot)), now)
        slots.setdefault(slot.replica_id, []).append(view)
    replicas: dict[Any, list[ReplicaView]] = {}
    for replica in Replica.objects.filter(cluster__project=project).order_by("name"):
        metrics = [(key, value) for key, value in sorted(replica.metrics.items()) if isinstance(value, int | float)]
        replicas.setdefault(replica.cluster_id, []).append(ReplicaView(replica, slots.get(replica.pk, []), metrics))
    traffic = _traffic(project, now)
    return [
        ClusterView(cluster, replicas.get(cluster.pk, []), *traffic.get(cluster.pk, (0, 0)))
        for cluster in Cluster.objects.filter(project=project).select_related("model").order_by("role", "slug")
    ]


def _slot_view(slot: ReplicaSlot, last: Transfer | None, now: datetime) -> SlotView:
    waiting = slot.desired_version_id is not None and slot.desired_version_id != slot.current_version_id
    lag_s = (now - slot.desired_at).total_seconds() if waiting and slot.desired_at else None
    return SlotView(slot, lag_in_versions(slot.current_version, slot.desired_version), lag_s, last)


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


def transfers_of(project: Project, size: int = 40) -> list[Transfer]:
    """The newest transfers of a project, newest first."""
    return list(
        Transfer.objects.filter(replica__cluster__project=project)
        .select_related("replica__cluster", "version", "from_version")
        .order_by("-pk")[:size]
    )
