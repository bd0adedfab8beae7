"""Replicas that register themselves, from wherever they run, and stay in the fleet while they renew a lease."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Value
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.models import Cluster, Replica
from controlplane.selectors.replica_tokens import Listener, enrolled_reach, peer_token, replica_token
from controlplane.services.events import Actor
from controlplane.services.fleet import replica_register
from controlplane.services.replica_reports import replica_changed
from controlplane.services.transitions import transition
from controlplane.states import ReplicaState
from rl_core.errors import DestinationRefused

DEFAULT_LEASE_S = 30
MAX_LEASE_S = 3600
MAX_REPLICAS = 4096  # of one cluster


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A replica's row with the tokens that its listeners have to ask for, and that of its cluster's peers."""

    replica: Replica
    tokens: dict[Listener, str]
    peer_token: str


@transaction.atomic
def replica_enrol(
    *,
    cluster: Cluster,
    name: str,
    inference_url: str,
    control_url: str,
    weight_slots: int,
    lease_s: int,
    actor: Actor,
) -> Enrolment:
    """Take a replica in, or back: its row, a lease, and its tokens, which are new every time.

    A name that is known moves to where it listens now, which is on the public internet or in `REPLICA_NETWORKS`.
    Raises: Conflict for a name that the operator registered, in a local cluster, and in one that is full; Invalid.
    """
    reach = enrolled_reach()
    for field, url in (("inference_url", inference_url), ("control_url", control_url)):
        try:
            reach.check(url)
        except DestinationRefused as error:
            raise Invalid(str(error), field) from error
    locked = Cluster.objects.select_for_update(no_key=True).get(pk=cluster.pk)
    if locked.local:
        raise Conflict(f"cluster {locked.slug} is local: `manage.py up` runs its engines")
    present = locked.replicas.filter(name=name).first()
    if present is not None and present.lease_until is None:
        raise Conflict(f"replica {name} was registered by the operator; choose another name", "name")
    if present is None and locked.replicas.count() >= MAX_REPLICAS:
        raise Conflict(f"cluster {locked.slug} has {MAX_REPLICAS} replicas")
    replica = replica_register(
        cluster=locked,
        name=name,
        inference_url=inference_url,
        control_url=control_url,
        weight_slots=weight_slots,
        actor=actor,
    )
    Replica.objects.filter(pk=replica.pk).update(lease_until=_end(lease_s), enrolments=F("enrolments") + 1)
    replica.refresh_from_db()
    tokens = {one: replica_token(replica.pk, one, enrolment=replica.enrolment) for one in Listener}
    return Enrolment(replica, tokens, peer_token(locked.pk))


@transaction.atomic
def replica_renew(*, replica: Replica, lease_s: int) -> Replica:
    """Extend the lease, counted from now; 0 gives it up: the replica is told to stop and takes no more requests.

    Raises: NotFound for one that the operator registered.
    """
    if not Replica.objects.filter(pk=replica.pk, lease_until__isnull=False).update(lease_until=_end(lease_s)):
        raise NotFound(f"replica {replica.name} has no lease: the operator registered it")
    if lease_s == 0:
        _lapse(replica, "it gave its lease up")
    replica.refresh_from_db()
    return replica


def leases_lapsed() -> list[Replica]:
    """Replicas whose lease is over and that are not known to be offline yet."""
    lapsed = Replica.objects.filter(lease_until__lte=Now()).exclude(state=ReplicaState.OFFLINE)
    return list(lapsed.select_related("cluster").order_by("pk"))


@transaction.atomic
def lease_lapse(*, replica: Replica) -> None:
    """Note that a replica is gone. Routing left it out the moment the lease was over; this is for people to see."""
    _lapse(replica, "its lease lapsed")


def _lapse(replica: Replica, why: str) -> None:
    over = Replica.objects.select_for_update(no_key=True, of=("self",)).select_related("cluster")
    row = over.filter(pk=replica.pk, lease_until__lte=Now()).exclude(state=ReplicaState.OFFLINE).first()
    if row is not None:
        transition(row, to=ReplicaState.OFFLINE, error=why)
        replica_changed(row, error=why)


def _end(lease_s: int) -> object:
    if not 0 <= lease_s <= MAX_LEASE_S:
        raise Invalid(f"lease_s must be 0 to {MAX_LEASE_S} seconds, not {lease_s}", "lease_s")
    return Now() + Value(timedelta(seconds=lease_s))
