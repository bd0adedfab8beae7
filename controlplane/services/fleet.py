"""Clusters and replicas: where engines are, and what they should hold."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid
from controlplane.models import Cluster, ModelCard, PolicyVersion, Project, Replica, ReplicaSlot, Transfer
from controlplane.services.events import Actor, event_append, project_topic, require_reason
from controlplane.services.locks import replica_locked
from controlplane.services.retention import version_hold
from controlplane.services.transitions import sources_of, transition
from controlplane.services.work import work_cancel, work_enqueue
from controlplane.states import (
    DesiredSource,
    EventType,
    TransferState,
    VersionState,
    WeightSlot,
    WorkKind,
)
from rl_core.types import ClusterRole


def cluster_create(
    *,
    project: Project,
    slug: str,
    role: ClusterRole,
    region: str,
    capacity: int,
    actor: Actor,
    local: bool = False,
    model: ModelCard | None = None,
) -> Cluster:
    """Add a cluster. Raises: Conflict when the slug is taken; Invalid for a capacity below one."""
    if capacity < 1:
        raise Invalid(f"a cluster's capacity must be at least 1 session, not {capacity}", "capacity")
    with transaction.atomic():
        cluster, created = Cluster.objects.get_or_create(
            project=project,
            slug=slug,
            defaults={
                "role": role.value,
                "region": region,
                "capacity": capacity,
                "local": local,
                "model": model,
            },
        )
        if not created:
            raise Conflict(f"there is a cluster {slug!r} already", "slug")
        _event(
            project.pk,
            EventType.CLUSTER_CREATED,
            actor,
            {"cluster": str(cluster.pk), "slug": slug, "role": role.value, "region": region},
        )
    return cluster


# What may be changed of a cluster, from the least value on; None where that may be unknown or without a limit.
CONFIGURABLE: dict[str, int] = {"capacity": 1, "bandwidth_bytes_s": 1, "devices": 1, "dollars_device_hour": 0}
_MAY_BE_NONE = frozenset({"bandwidth_bytes_s", "dollars_device_hour"})


def cluster_configure(*, cluster: Cluster, actor: Actor, reason: str, **changes: float | str | None) -> Cluster:
    """Change `capacity`, `bandwidth_bytes_s` (None: no limit), or what the planner counts in: `device` (its name),
    `devices` of a replica, `dollars_device_hour` (None: not known). Raises: Invalid.
    """
    require_reason(reason, "say why the cluster changes")
    for name, value in changes.items():
        if name != "device" and name not in CONFIGURABLE:
            raise Invalid(f"a cluster's {name} cannot be changed", name)
        if name == "device" and not isinstance(value, str):
            raise Invalid("device is a name", name)
        if value is None and name not in _MAY_BE_NONE:
            raise Invalid(f"{name} must be given", name)
        if name == "bandwidth_bytes_s" and value is not None and cluster.role == ClusterRole.TRAINER.value:
            raise Invalid("a trainer's uploads are not limited: limit the clusters that fetch from the store", name)
        if isinstance(value, int | float) and not CONFIGURABLE[name] <= value < 2**53:
            raise Invalid(f"{name} must be at least {CONFIGURABLE[name]}, not {value}", name)
    with transaction.atomic():
        Cluster.objects.filter(pk=cluster.pk).update(**changes)
        said = ", ".join(f"{name} {'unset' if value is None else value}" for name, value in changes.items())
        data = {"cluster": str(cluster.pk), "slug": cluster.slug, "change": said}
        _event(cluster.project_id, EventType.CLUSTER_CHANGED, actor, data, reason)
    cluster.refresh_from_db()
    return cluster


def replica_register(
    *,
    cluster: Cluster,
    name: str,
    inference_url: str,
    control_url: str,
    actor: Actor,
    weight_slots: int = 1,
) -> Replica:
    """Add a replica, or note where a known one listens now. It has one slot row for each resident weight set.

    Slots that it has no longer are gone, and so is what was on its way to them.
    """
    if not 1 <= weight_slots <= len(WeightSlot):
        raise Invalid(f"weight_slots must be 1 to {len(WeightSlot)}, not {weight_slots}", "weight_slots")
    with transaction.atomic():
        replica, created = Replica.objects.get_or_create(cluster=cluster, name=name)
        replica_locked(replica.pk)
        moved = created or (replica.inference_url, replica.control_url) != (inference_url, control_url)
        Replica.objects.filter(pk=replica.pk).update(
            inference_url=inference_url, control_url=control_url, weight_slots=weight_slots
        )
        for slot in list(WeightSlot)[:weight_slots]:
            ReplicaSlot.objects.get_or_create(replica=replica, slot=slot.value)
        for row in replica.slots.filter(slot__in=list(WeightSlot)[weight_slots:]):
            slot_target(replica=replica, slot=WeightSlot(row.slot), version=None, source=None, actor=actor, unpin=True)
            row.delete()
        if moved:
            _event(
                cluster.project_id,
                EventType.REPLICA_REGISTERED,
                actor,
                {"replica": str(replica.pk), "cluster": cluster.slug, "name": name, "inference_url": inference_url},
            )
    replica.refresh_from_db()
    return replica


def slot_target(
    *,
    replica: Replica,
    slot: WeightSlot,
    version: PolicyVersion | None,
    source: DesiredSource | None,
    actor: Actor,
    reason: str = "",
    repair: bool = False,
    unpin: bool = False,
) -> Transfer | None:
    """Set what a slot should hold and start the transfer to it; transfers under way for the slot are superseded.

    `version` None empties the wish: the slot keeps what it has and follows nothing. Asking for what is desired and
    under way already changes nothing and returns that transfer; a version that was desired and has not arrived keeps
    its `desired_at`. With `repair` the replica fetches a snapshot, whatever it holds. Raises: Conflict for a version
    that is not committed, or is retired; and for a pinned slot, unless a person `unpin`s it.
    """
    if version is not None and version.state != VersionState.COMMITTED:
        raise Conflict(f"version {version.ref} is not committed: no replica may hold it")
    with transaction.atomic():
        replica_locked(replica.pk)
        if version is not None:
            version_hold(version, good=True)
        row = ReplicaSlot.objects.get(replica=replica, slot=slot.value)
        row.replica = replica  # as the caller has it, with its cluster
        if row.desired_source == DesiredSource.PINNED and source != DesiredSource.PINNED and not unpin:
            raise Conflict(f"slot {slot.value} of {replica.name} is pinned; unpin it first")
        under_way = Transfer.objects.filter(
            replica=replica, slot=slot.value, state__in=sources_of(TransferState.SUPERSEDED)
        )
        fitting = under_way.filter(Q(repair=True) | Q(repair=repair), version=version)
        going = fitting.first() if version else None
        ReplicaSlot.objects.filter(pk=row.pk).update(
            desired_version=version,
            desired_source=source or "",
            desired_at=row.desired_at if row.awaits(version) else Now(),
            desired_reason=reason[:500],
        )
        stale = [transfer for transfer in under_way if going is None or transfer.pk != going.pk]
        _supersede(stale)
        if version is None or going is not None:
            return going
        return _transfer_start(row, version, source=source, repair=repair, actor=actor, reason=reason)


def _transfer_start(
    row: ReplicaSlot, version: PolicyVersion, *, source: DesiredSource | None, repair: bool, actor: Actor, reason: str
) -> Transfer:
    """Send a slot to a version. `row` is as it was before its wish changed."""
    cluster = row.replica.cluster
    transfer = Transfer.objects.create(
        replica=row.replica,
        slot=row.slot,
        version=version,
        from_version_id=row.current_version_id,
        full_bytes=version.full_bytes,
        repair=repair,
    )
    work_enqueue(kind=WorkKind.TRANSFER, ref=transfer.pk, project_id=cluster.project_id)
    data = {
        "replica": str(row.replica_id),
        "cluster": cluster.slug,
        "slot": row.slot,
        "version": str(version.ref),
        "source": source.value if source else "",
        "transfer": str(transfer.pk),
    }
    _event(cluster.project_id, EventType.REPLICA_TARGETED, actor, data, reason)
    return transfer


def _supersede(transfers: list[Transfer]) -> None:
    if not transfers:
        return
    work_cancel(kind=WorkKind.TRANSFER, refs=[transfer.pk for transfer in transfers])
    for transfer in transfers:
        transition(transfer, to=TransferState.SUPERSEDED, finished_at=Now())


def _event(project_id: uuid.UUID, event_type: EventType, actor: Actor, data: dict[str, Any], reason: str = "") -> None:
    event_append(
        project_id=project_id,
        topic=project_topic(project_id),
        event_type=event_type,
        actor=actor,
        reason=reason,
        data=data,
    )
