"""The replicas that follow a run's head: what is announced to them, and what their links gave."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Final

from django.db.models import QuerySet

from controlplane.models import Cluster, Publication, Replica, ReplicaSlot, Run, Transfer
from controlplane.selectors.answering import answering
from controlplane.selectors.run_clusters import spec_of
from controlplane.selectors.transfer_plans import MAX_PEERS, link_share
from controlplane.states import FOLLOWING, PublicationKind, TransferState
from rl_core.links import Choice, Link, Shipped, choose_profile
from rl_core.types import Profile

_NEWEST: Final = 200  # transfers that are looked at, of all clusters together
_OF_A_CLUSTER: Final = 8


@dataclass(frozen=True, slots=True)
class Follower:
    """A replica whose `slots` will be told to hold the run's next version. Else as in a transfer."""

    replica: Replica
    slots: list[str]
    peers: list[str]
    limit_bytes_s: float | None


def followers(run: Run) -> list[Follower]:
    """Those that answer now. What one of them fetches ahead it fetches while no slot of it reads: in a slot's share."""
    by_cluster: dict[Cluster, list[Replica]] = defaultdict(list)
    slots: dict[object, list[str]] = defaultdict(list)
    for slot in _slots(run).order_by("slot"):
        slots[slot.replica_id].append(slot.slot)
    rows = Replica.objects.filter(answering(), pk__in=list(slots)).exclude(control_url="")
    for replica in rows.select_related("cluster").order_by("cluster__slug", "name"):
        by_cluster[replica.cluster].append(replica)
    return [
        Follower(replica, slots[replica.pk], _peers(replica, replicas), link_share(cluster))
        for cluster, replicas in by_cluster.items()
        for replica in replicas
    ]


def profile_for(run: Run) -> Choice:
    """What the run's next delta is encoded in."""
    fixed = spec_of(run).delta_profile
    if fixed is not None:
        return Choice(fixed, "the run's spec says so")
    arrived = _arrived(run)
    return choose_profile(_shipped(run, arrived), _slowest(arrived))


def _slots(run: Run) -> QuerySet[ReplicaSlot]:
    return ReplicaSlot.objects.filter(desired_version__lineage_id=run.lineage_id, desired_source__in=FOLLOWING)


def _peers(replica: Replica, replicas: list[Replica]) -> list[str]:
    others = [other.inference_url for other in replicas if other.pk != replica.pk and other.inference_url]
    return others[:MAX_PEERS]


def _arrived(run: Run) -> list[Transfer]:
    """The newest deltas that came to the run's followers, newest first."""
    rows = Transfer.objects.filter(
        replica__in=_slots(run).values("replica"),
        version__lineage_id=run.lineage_id,
        state=TransferState.DONE,
        hops=1,
        repair=False,
    )
    return list(rows.select_related("replica__cluster").order_by("-finished_at")[:_NEWEST])


def _slowest(arrived: list[Transfer]) -> Link | None:
    rates: dict[str, list[float]] = defaultdict(list)
    for transfer in arrived:
        if transfer.bytes_per_s and len(rates[transfer.replica.cluster.slug]) < _OF_A_CLUSTER:
            rates[transfer.replica.cluster.slug].append(transfer.bytes_per_s)
    links = [Link(cluster=cluster, bytes_per_s=median(found)) for cluster, found in rates.items() if found]
    return min(links, key=lambda link: link.bytes_per_s, default=None)


def _shipped(run: Run, arrived: list[Transfer]) -> Shipped | None:
    """The newest delta whose encoding was measured and that arrived somewhere."""
    decode_s: dict[object, float] = {}
    for transfer in arrived:
        taken = transfer.timings.get("decode_s", 0.0)
        decode_s[transfer.version_id] = max(taken, decode_s.get(transfer.version_id, 0.0))
    measured = Publication.objects.filter(
        version__in=list(decode_s), kind=PublicationKind.DELTA, encode_s__isnull=False, bytes__isnull=False
    ).exclude(profile="")
    row = measured.order_by("-published_at").first()
    if row is None or row.bytes is None or row.encode_s is None:
        return None
    return Shipped(
        profile=Profile(row.profile),
        bytes=row.bytes,
        encode_s=row.encode_s,
        decode_s=decode_s[row.version_id],
        upload_s=row.upload_s or 0.0,
    )
