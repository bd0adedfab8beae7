"""Clusters and replicas: where engines are, what they report, and what they should hold."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid
from controlplane.models import Cluster, ModelCard, PolicyVersion, Project, Replica, ReplicaSlot, Transfer
from controlplane.services.events import SYSTEM, Actor, event_append, project_topic
from controlplane.services.transitions import sources_of, transition
from controlplane.services.work import work_cancel, work_enqueue
from controlplane.states import (
    DesiredSource,
    EventType,
    ReplicaState,
    TransferState,
    VersionState,
    WeightSlot,
    WorkKind,
)
from rl_core.errors import SpecError
from rl_core.types import ClusterRole, VersionRef


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What one weight slot of a replica said it holds; `version` in text form, empty for none."""

    version: str = ""
    root: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One look at a replica. `error` is set when it did not answer or says that it is not well."""

    reachable: bool
    slots: dict[str, SlotReport] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    poisoned: bool = False
    error: str = ""


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
        moved = created or (replica.inference_url, replica.control_url) != (inference_url, control_url)
        Replica.objects.filter(pk=replica.pk).update(
            inference_url=inference_url, control_url=control_url, weight_slots=weight_slots
        )
        for slot in list(WeightSlot)[:weight_slots]:
            ReplicaSlot.objects.get_or_create(replica=replica, slot=slot.value)
        for row in replica.slots.filter(slot__in=list(WeightSlot)[weight_slots:]):
            slot_target(replica=replica, slot=WeightSlot(row.slot), version=None, source=None, actor=actor)
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


def replica_report(*, replica: Replica, report: ReplicaReport) -> Replica:
    """Write down one look at a replica; an event only when its state or what it holds changed."""
    with transaction.atomic():
        row = Replica.objects.select_for_update().select_related("cluster").get(pk=replica.pk)
        changed = report.reachable and _note_slots(row, report)
        state = _state_of(row, report)
        values: dict[str, Any] = {"error": report.error[:500], "metrics": report.metrics}
        if report.reachable:
            values["seen_at"] = Now()
        if state != row.state:
            transition(row, to=state, **values)
            changed = True
        else:
            Replica.objects.filter(pk=row.pk).update(**values)
        if changed:
            _event(
                row.cluster.project_id,
                EventType.REPLICA_CHANGED,
                SYSTEM,
                {
                    "replica": str(row.pk),
                    "cluster": row.cluster.slug,
                    "state": state.value,
                    "error": report.error[:200],
                },
            )
    row.refresh_from_db()
    return row


def _note_slots(replica: Replica, report: ReplicaReport) -> bool:
    """Write what the slots hold now; whether any holds another version than before."""
    changed = False
    for slot in ReplicaSlot.objects.select_for_update().filter(replica=replica).order_by("slot"):
        said = report.slots.get(slot.slot, SlotReport())
        version = version_of(said.version)
        same = slot.current_version_id == (version.pk if version else None) and slot.current_root == said.root
        changed = changed or not same
        ReplicaSlot.objects.filter(pk=slot.pk).update(
            current_version=version, current_root=said.root, reported_at=Now()
        )
    return changed


def _state_of(replica: Replica, report: ReplicaReport) -> ReplicaState:
    if not report.reachable:
        return ReplicaState.OFFLINE
    if report.poisoned:
        return ReplicaState.POISONED
    moving = Transfer.objects.filter(replica=replica, state=TransferState.RUNNING).exists()
    if replica.state == ReplicaState.DRAINING and not moving:
        return ReplicaState.DRAINING
    return ReplicaState.RECONCILING if moving else ReplicaState.READY


def version_of(text: str) -> PolicyVersion | None:
    """The committed version that an engine names, or None when it is not one of ours."""
    try:
        ref = VersionRef.parse(text)
        lineage = uuid.UUID(ref.lineage)
    except (SpecError, ValueError):
        return None
    return PolicyVersion.objects.filter(lineage_id=lineage, epoch=ref.epoch, number=ref.number).first()


def slot_target(
    *,
    replica: Replica,
    slot: WeightSlot,
    version: PolicyVersion | None,
    source: DesiredSource | None,
    actor: Actor,
    reason: str = "",
) -> Transfer | None:
    """Set what a slot should hold and start the transfer to it; transfers under way for the slot are superseded.

    `version` None empties the wish: the slot keeps what it has and follows nothing. Asking for what is desired and
    under way already changes nothing and returns that transfer. Raises: Conflict for a version that is not committed.
    """
    if version is not None and (version.state != VersionState.COMMITTED or version.quarantined_at is not None):
        raise Conflict(f"version {version.ref} is not a committed version in good standing: no replica may hold it")
    with transaction.atomic():
        row = ReplicaSlot.objects.select_for_update().get(replica=replica, slot=slot.value)
        under_way = Transfer.objects.filter(
            replica=replica, slot=slot.value, state__in=sources_of(TransferState.SUPERSEDED)
        )
        going = under_way.filter(version=version).first() if version else None
        ReplicaSlot.objects.filter(pk=row.pk).update(
            desired_version=version, desired_source=source or "", desired_at=Now()
        )
        stale = [transfer for transfer in under_way if going is None or transfer.pk != going.pk]
        _supersede(stale)
        if version is None or going is not None:
            return going
        transfer = Transfer.objects.create(
            replica=replica,
            slot=slot.value,
            version=version,
            from_version_id=row.current_version_id,
            full_bytes=version.full_bytes,
        )
        work_enqueue(kind=WorkKind.TRANSFER, ref=transfer.pk, project_id=replica.cluster.project_id)
        _event(
            replica.cluster.project_id,
            EventType.REPLICA_TARGETED,
            actor,
            {
                "replica": str(replica.pk),
                "cluster": replica.cluster.slug,
                "slot": slot.value,
                "version": str(version.ref),
                "source": source.value if source else "",
                "transfer": str(transfer.pk),
            },
            reason,
        )
    return transfer


def _supersede(transfers: list[Transfer]) -> None:
    if not transfers:
        return
    for transfer in transfers:
        transition(transfer, to=TransferState.SUPERSEDED, finished_at=Now())
    work_cancel(kind=WorkKind.TRANSFER, refs=[transfer.pk for transfer in transfers])


def _event(project_id: uuid.UUID, event_type: EventType, actor: Actor, data: dict[str, Any], reason: str = "") -> None:
    event_append(
        project_id=project_id,
        topic=project_topic(project_id),
        event_type=event_type,
        actor=actor,
        reason=reason,
        data=data,
    )
