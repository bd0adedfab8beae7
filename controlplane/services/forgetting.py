"""Replicas that are gone for good leave the fleet: by a person's word, or long after their lease."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q, Value
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import Replica, Transfer
from controlplane.services.events import CONDUCTOR, Actor, event_append, project_topic, require_reason
from controlplane.services.work import work_cancel
from controlplane.states import EventType, ReplicaState, WorkKind


@transaction.atomic
def replica_forget(*, replica: Replica, actor: Actor, reason: str) -> None:
    """Take an offline replica out of the fleet, with its slots, transfers and loans; the event log keeps what it was.

    One that registers again is a new replica. Raises: Conflict for one that may be there; Invalid without a reason.
    """
    require_reason(reason, "say why the replica is forgotten")
    row = Replica.objects.select_for_update(of=("self",)).select_related("cluster").get(pk=replica.pk)
    if row.cluster.local:
        raise Conflict(f"cluster {row.cluster.slug} is local: `manage.py up` runs its engines")
    if row.state != ReplicaState.OFFLINE:
        raise Conflict(f"replica {row.name} is {row.state}; stop its engine first")
    if Replica.objects.filter(pk=row.pk, lease_until__gt=Now()).exists():
        raise Conflict(f"the lease of replica {row.name} is not over; stop its engine first")
    _forget(row, actor=actor, reason=reason)


def replicas_gone() -> list[Replica]:
    """Replicas whose lease was over for `REPLICA_FORGET_S`. Those that the operator registered have none, and stay."""
    return list(Replica.objects.filter(_gone()).order_by("pk"))


@transaction.atomic
def replica_forget_itself(*, replica: Replica) -> bool:
    """Forget a replica that is gone, unless it came back meanwhile; whether it was."""
    rows = Replica.objects.select_for_update(of=("self",)).select_related("cluster")
    row = rows.filter(_gone(), pk=replica.pk).first()
    if row is not None:
        _forget(row, actor=CONDUCTOR, reason="its lease was over for long")
    return row is not None


def _gone() -> Q:
    return Q(state=ReplicaState.OFFLINE, lease_until__lt=Now() - Value(timedelta(seconds=settings.REPLICA_FORGET_S)))


def _forget(replica: Replica, *, actor: Actor, reason: str) -> None:
    transfers = Transfer.objects.filter(replica=replica)
    work_cancel(kind=WorkKind.TRANSFER, refs=transfers.values_list("pk", flat=True))
    data = {"replica": str(replica.pk), "cluster": replica.cluster.slug, "name": replica.name, "action": "forgotten"}
    replica.delete()
    event_append(
        project_id=replica.cluster.project_id,
        topic=project_topic(replica.cluster.project_id),
        event_type=EventType.REPLICA_STEERED,
        actor=actor,
        reason=reason,
        data=data,
    )
