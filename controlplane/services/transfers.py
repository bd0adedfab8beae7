"""Transfers: a replica slot's move to a version, as its worker sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import Replica, ReplicaSlot, Transfer
from controlplane.services.events import SYSTEM, conductor_nudge, event_append, project_topic
from controlplane.services.transitions import sources_of, transition
from controlplane.services.work import Claim, work_fenced, work_finish
from controlplane.states import EventType, ReplicaState, TransferState


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What a replica said when it had the version: its root, what moved, how long each part took (seconds)."""

    root: str
    fetched_bytes: int
    hops: int
    timings: dict[str, float]


def transfer_begin(claim: Claim) -> Transfer | None:
    """The transfer to work on, now running; None when it has ended (the unit is then finished)."""
    with work_fenced(claim):
        transfer = Transfer.objects.select_related("replica__cluster", "version__parent").get(pk=claim.ref)
        if transfer.state == TransferState.FAILED and _still_wanted(transfer):
            transition(transfer, to=TransferState.PENDING, error="", finished_at=None)
        if transfer.state == TransferState.PENDING:
            transition(transfer, to=TransferState.RUNNING)
            # Only a hint for pages until the next look at the replica, so no race over it is worth a refusal.
            Replica.objects.filter(pk=transfer.replica_id, state=ReplicaState.READY).update(
                state=ReplicaState.RECONCILING
            )
            transfer_event(transfer)
        if transfer.state != TransferState.RUNNING:
            work_finish(claim)
            return None
    return transfer


def transfer_done(claim: Claim, *, report: TransferReport) -> Transfer:
    """The replica holds the version. Raises: Conflict when its root is another; StaleFence."""
    with work_fenced(claim):
        transfer = Transfer.objects.select_related("replica__cluster", "version").get(pk=claim.ref)
        if report.root != transfer.version.root:
            raise Conflict(
                f"replica {transfer.replica.name} reports root {report.root[:16]}… for {transfer.version.ref}, "
                f"whose root is {transfer.version.root[:16]}…"
            )
        transition(
            transfer,
            to=TransferState.DONE,
            fetched_bytes=report.fetched_bytes,
            hops=report.hops,
            timings=report.timings,
            finished_at=Now(),
        )
        ReplicaSlot.objects.filter(replica=transfer.replica, slot=transfer.slot).update(
            current_version=transfer.version, current_root=report.root, reported_at=Now()
        )
        if not _moving(transfer):
            Replica.objects.filter(pk=transfer.replica_id, state=ReplicaState.RECONCILING).update(
                state=ReplicaState.READY
            )
        work_finish(claim)
        transfer_event(transfer, **report.timings)
    return transfer


def transfer_fail(*, transfer: Transfer, reason: str) -> None:
    """The transfer's unit is dead: the slot stays where it is until it is targeted again."""
    with transaction.atomic():
        transition(transfer, to=TransferState.FAILED, error=reason[:500], finished_at=Now())
        transfer_event(transfer, error=reason[:200])


def transfer_event(transfer: Transfer, **more: Any) -> None:
    """Append the transfer's present state to its project's log."""
    project_id = transfer.replica.cluster.project_id
    event_append(
        project_id=project_id,
        topic=project_topic(project_id),
        event_type=EventType.TRANSFER_CHANGED,
        actor=SYSTEM,
        data={
            "transfer": str(transfer.pk),
            "replica": str(transfer.replica_id),
            "cluster": transfer.replica.cluster.slug,
            "slot": transfer.slot,
            "version": str(transfer.version.ref),
            "state": transfer.state,
            "fetched_bytes": transfer.fetched_bytes,
            **more,
        },
    )
    conductor_nudge()


def _moving(transfer: Transfer) -> bool:
    others = Transfer.objects.filter(replica=transfer.replica, state=TransferState.RUNNING).exclude(pk=transfer.pk)
    return others.exists()


def _still_wanted(transfer: Transfer) -> bool:
    """Whether a failed transfer whose unit was replayed is what its slot still waits for."""
    slot = ReplicaSlot.objects.filter(replica=transfer.replica, slot=transfer.slot, desired_version=transfer.version_id)
    others = Transfer.objects.filter(
        replica=transfer.replica, slot=transfer.slot, state__in=sources_of(TransferState.SUPERSEDED)
    )
    return slot.exists() and not others.exists()
