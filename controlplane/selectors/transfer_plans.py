"""What a transfer is told besides its target: who may have the bytes already, and how fast it may go."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Exists, OuterRef, Q

from controlplane.models import Cluster, Replica, ReplicaSlot, Transfer
from controlplane.selectors.answering import answering, there
from controlplane.states import UNDER_WAY, TransferState

MAX_PEERS = 8


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`peers` are inference URLs of replicas of the same cluster, `limit_bytes_s` is a slot's share of the cluster's
    link; None: no limit. Where the weights are read `publications.reading_of` says.
    """

    peers: list[str]
    limit_bytes_s: float | None


def transfer_plan(transfer: Transfer) -> TransferPlan:
    """How a replica spares the link of its cluster on the way to its version."""
    return TransferPlan(_peers(transfer), link_share(transfer.replica.cluster))


def link_share(cluster: Cluster) -> float | None:
    """What one slot may read of its cluster's link: as much as is left to it when all of them read at once.

    Slots are counted, whoever reads now: a share is told once, and none of them is told of those that begin later.
    """
    if cluster.bandwidth_bytes_s is None:
        return None
    slots = ReplicaSlot.objects.filter(replica__cluster=cluster)
    moving = Transfer.objects.filter(replica=OuterRef("replica"), state__in=UNDER_WAY)
    return cluster.bandwidth_bytes_s / max(1, slots.filter(there("replica__") | Exists(moving)).count())


def _peers(transfer: Transfer) -> list[str]:
    """Replicas that hold the version, or are on their way to it; those that have been there for longest first."""
    others = Replica.objects.filter(answering(), cluster=transfer.replica.cluster_id).exclude(pk=transfer.replica_id)
    holding = Q(slots__current_version=transfer.version_id, slots__fault="")
    coming = Q(transfers__version=transfer.version_id, transfers__state__in=[TransferState.RUNNING, TransferState.DONE])
    urls = others.filter(holding | coming).exclude(inference_url="").order_by("pk")
    return list(urls.values_list("inference_url", flat=True).distinct()[:MAX_PEERS])
