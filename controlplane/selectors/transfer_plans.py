"""What a transfer is told besides its target: who may have the bytes already, and how fast it may go."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q

from controlplane.models import Replica, Transfer
from controlplane.selectors.answering import answering
from controlplane.states import TransferState

MAX_PEERS = 8


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`peers` are inference URLs of replicas of the same cluster, `limit_bytes_s` is this transfer's share of the
    cluster's link; None: no limit. Where the weights are read `publications.reading_of` says.
    """

    peers: list[str]
    limit_bytes_s: float | None


def transfer_plan(transfer: Transfer) -> TransferPlan:
    """How a replica spares the link of its cluster on the way to its version."""
    return TransferPlan(_peers(transfer), _limit(transfer))


def _peers(transfer: Transfer) -> list[str]:
    """Replicas that hold the version, or are on their way to it; those that have been there for longest first."""
    others = Replica.objects.filter(answering(), cluster=transfer.replica.cluster_id).exclude(pk=transfer.replica_id)
    there = Q(slots__current_version=transfer.version_id, slots__fault="")
    coming = Q(transfers__version=transfer.version_id, transfers__state__in=[TransferState.RUNNING, TransferState.DONE])
    urls = others.filter(there | coming).exclude(inference_url="").order_by("pk")
    return list(urls.values_list("inference_url", flat=True).distinct()[:MAX_PEERS])


def _limit(transfer: Transfer) -> float | None:
    """The cluster's bandwidth, shared by the transfers of it that run or wait: what waits begins before long."""
    total = transfer.replica.cluster.bandwidth_bytes_s
    if total is None:
        return None
    states = [TransferState.PENDING, TransferState.RUNNING]
    under_way = Transfer.objects.filter(replica__cluster=transfer.replica.cluster_id, state__in=states)
    return total / max(1, under_way.count())
