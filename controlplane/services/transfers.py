"""Transfers: a replica slot's move to a version, as its worker sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import Attempt, Replica, ReplicaSlot, Transfer, WorkUnit
from controlplane.services.events import SYSTEM, conductor_nudge, event_append, project_topic
from controlplane.services.locks import replica_locked
from controlplane.services.transitions import sources_of, transition
from controlplane.services.work import Claim, work_fenced, work_finish, work_yield
from controlplane.states import AttemptState, EventType, ReplicaState, TransferState, WorkKind, WorkState

_AGAIN_S: Final = 2.0
_TOLD: Final = "made_room"
_NOTHING_YET: dict[str, Any] = {
    "phase": "",
    "done_bytes": None,
    "total_bytes": None,
    "bytes_per_s": None,
    "remaining_s": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What a replica said when it had the version: its root, what moved, how long each part took (seconds).

    `store_bytes_s` is what the store gave it, None where it read nothing there.
    """

    root: str
    fetched_bytes: int
    hops: int
    timings: dict[str, float]
    store_bytes_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProgress:
    """How far a transfer has come. Bytes are fetched ones of the whole path; `remaining_s` None: not known yet."""

    phase: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    remaining_s: float | None


def transfer_begin(claim: Claim) -> Transfer | None:
    """The transfer to work on, now running; None when it has ended (the unit is then finished)."""
    with _fenced(claim):
        related = ("replica__cluster", "version__parent", "from_version")
        transfer = Transfer.objects.select_related(*related).get(pk=claim.ref)
        if transfer.state == TransferState.FAILED and _still_wanted(transfer):
            transition(transfer, to=TransferState.PENDING, error="", finished_at=None, **_NOTHING_YET)
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


def transfer_progress(claim: Claim, *, progress: TransferProgress) -> None:
    """Write down how far a transfer is, and tell who watches. The caller sees to it that this is not done too often.

    Raises: StaleFence.
    """
    with _fenced(claim):
        transfer = Transfer.objects.select_related("replica__cluster", "version").get(pk=claim.ref)
        if transfer.state != TransferState.RUNNING:
            return
        changes = asdict(progress)
        Transfer.objects.filter(pk=transfer.pk).update(**changes)
        transfer_event(transfer, changes, nudge=False)


def transfer_make_room(claim: Claim) -> bool:
    """Queue a transfer that is under way behind those that wait for a worker; False while none waits.

    The replica goes on meanwhile. Raises: StaleFence.
    """
    sent = Q(sends__gt=0) | Q(next_send_at__lte=Now())
    if not WorkUnit.objects.filter(sent, kind=WorkKind.TRANSFER, state=WorkState.QUEUED).exists():
        return False
    work_yield(claim, delay_s=_AGAIN_S, code=_TOLD)
    return True


def transfer_goes_on(claim: Claim) -> bool:
    """Whether the attempt before this one made room: the replica was told its target, and only has to be looked at."""
    before = Attempt.objects.filter(unit=claim.unit_id, number=claim.fence - 1, state=AttemptState.YIELDED)
    return before.filter(error_code=_TOLD).exists()


def transfer_done(claim: Claim, *, report: TransferReport) -> Transfer:
    """The replica holds the version. Raises: Conflict when its root is another; StaleFence."""
    with _fenced(claim):
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
            phase="",
            done_bytes=report.fetched_bytes,
            bytes_per_s=report.store_bytes_s,
            remaining_s=None,
        )
        ReplicaSlot.objects.filter(replica=transfer.replica, slot=transfer.slot).update(
            current_version=transfer.version, current_root=report.root, reported_at=Now()
        )
        if not _moving(transfer):
            Replica.objects.filter(pk=transfer.replica_id, state=ReplicaState.RECONCILING).update(
                state=ReplicaState.READY
            )
        work_finish(claim)
        transfer_event(transfer, report.timings)
    return transfer


def transfer_fail(*, transfer: Transfer, reason: str) -> None:
    """The transfer's unit is dead: the slot stays where it is until it is targeted again."""
    with transaction.atomic():
        replica_locked(transfer.replica_id)
        transfer.refresh_from_db(fields=["state"])
        transition(transfer, to=TransferState.FAILED, error=reason[:500], finished_at=Now())
        transfer_event(transfer, {"error": reason[:200]})


def transfer_event(transfer: Transfer, more: Mapping[str, Any] | None = None, *, nudge: bool = True) -> None:
    """Append the transfer's present state to its project's log. Without `nudge` the conductor has nothing to do."""
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
            **(more or {}),
        },
    )
    if nudge:
        conductor_nudge()


@contextmanager
def _fenced(claim: Claim) -> Iterator[None]:
    """The claim's unit and before it the transfer's replica, locked. Raises: StaleFence."""
    with transaction.atomic():
        replica_locked(Transfer.objects.values_list("replica", flat=True).get(pk=claim.ref))
        with work_fenced(claim):
            yield


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
