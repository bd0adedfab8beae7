"""What people do to a replica: pin a slot, drain, undrain, repair. And the repairs that the conductor tries itself."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, Value
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid
from controlplane.models import Lane, PolicyVersion, Replica, ReplicaSlot, Transfer
from controlplane.services.events import CONDUCTOR, Actor, conductor_nudge, event_append, project_topic, require_reason
from controlplane.services.fleet import slot_target
from controlplane.services.loans import loan_call_back, loan_give_up, version_good
from controlplane.services.locks import replica_locked
from controlplane.services.replica_reports import idle_in, replica_changed
from controlplane.services.transitions import transition
from controlplane.states import DesiredSource, EventType, ReplicaState, TransferState, WeightSlot

MAX_REPAIRS = 3
REPAIR_AFTER_S = 10.0  # doubled with every repair that did not help
WELL_AGAIN_S = 3600.0  # a replica that was well for so long after a repair starts counting anew


@transaction.atomic
def replica_pin(*, replica: Replica, slot: WeightSlot, version: PolicyVersion, actor: Actor, reason: str) -> None:
    """Make a slot hold one version until it is unpinned, whatever else would be there. A loan of the slot ends.

    Raises: Conflict for a version that is not committed or not in good standing; Invalid without a reason, and for a
    version of a model that the cluster does not have.
    """
    require_reason(reason, "say why the slot is pinned")
    model = replica.cluster.model
    if model is not None and version.lineage.model_id != model.pk:
        raise Invalid(f"version {version.ref} is not of {model.slug}, which cluster {replica.cluster} has", "version")
    replica_locked(replica.pk)
    _require_slot(replica, slot)
    loan_give_up(replica_id=replica.pk, slot=slot, reason=f"pinned: {reason}")
    slot_target(replica=replica, slot=slot, version=version, source=DesiredSource.PINNED, actor=actor, reason=reason)
    _record(replica, actor, f"slot {slot.value} pinned to {version.ref}", reason)


@transaction.atomic
def replica_unpin(*, replica: Replica, slot: WeightSlot, actor: Actor, reason: str) -> None:
    """Let a pinned slot go: whoever drives its cluster says what it holds next. Raises: Conflict when it is not."""
    _require_slot(replica, slot)
    replica_locked(replica.pk)
    row = ReplicaSlot.objects.get(replica=replica, slot=slot.value)
    if row.desired_source != DesiredSource.PINNED:
        raise Conflict(f"slot {slot.value} of {replica.name} is not pinned")
    slot_target(replica=replica, slot=slot, version=None, source=None, actor=actor, reason=reason, unpin=True)
    _record(replica, actor, f"slot {slot.value} unpinned", reason)
    conductor_nudge()


@transaction.atomic
def replica_drain(*, replica: Replica, actor: Actor, reason: str) -> Replica:
    """Take a replica out: it finishes what it has and is given nothing new; weights go on reaching it.

    It stays drained over restarts, until somebody undrains it. A loan of it is called back.
    Raises: Conflict when it is drained already; Invalid without a reason.
    """
    require_reason(reason, "say why the replica is drained")
    row = replica_locked(replica.pk)
    if row.drained_at is not None:
        raise Conflict(f"replica {row.name} is drained already")
    Replica.objects.filter(pk=row.pk).update(drained_at=Now(), drained_reason=reason[:500])
    if row.state in (ReplicaState.READY, ReplicaState.RECONCILING):
        transition(row, to=ReplicaState.DRAINED if idle_in(row.metrics) else ReplicaState.DRAINING)
        replica_changed(row)
    loan_call_back(replica_id=row.pk, actor=actor, reason=f"the replica is drained: {reason}")
    _record(row, actor, "drained", reason)
    conductor_nudge()
    row.refresh_from_db()
    return row


@transaction.atomic
def replica_undrain(*, replica: Replica, actor: Actor, reason: str) -> Replica:
    """Give a drained replica requests again. Raises: Conflict when it is not drained; Invalid without a reason."""
    require_reason(reason, "say why the replica comes back")
    row = replica_locked(replica.pk)
    if row.drained_at is None:
        raise Conflict(f"replica {row.name} is not drained")
    Replica.objects.filter(pk=row.pk).update(drained_at=None, drained_reason="")
    if row.state in (ReplicaState.DRAINING, ReplicaState.DRAINED):
        moving = Transfer.objects.filter(replica=row, state=TransferState.RUNNING).exists()
        transition(row, to=ReplicaState.RECONCILING if moving else ReplicaState.READY)
        replica_changed(row)
    _record(row, actor, "undrained", reason)
    conductor_nudge()
    row.refresh_from_db()
    return row


@transaction.atomic
def replica_repair(*, replica: Replica, actor: Actor, reason: str) -> Replica:
    """Fetch what the replica should hold from snapshots, whatever it holds now; repairs by itself count anew.

    Raises: Conflict when it is offline, or when it is not known what it should hold; Invalid without a reason.
    """
    require_reason(reason, "say why the replica is repaired")
    row = replica_locked(replica.pk)
    if row.state == ReplicaState.OFFLINE:
        raise Conflict(f"replica {row.name} is offline; it starts from its model's own weights when it comes back")
    begun = _repair(row, list(row.slots.order_by("slot")), actor=actor, reason=reason)
    if not begun:
        raise Conflict(f"replica {row.name} is told to hold no version; pin one")
    Replica.objects.filter(pk=row.pk).update(repairs=0, repaired_at=Now())
    _record(row, actor, "repair begun", reason)
    row.refresh_from_db()
    return row


def replicas_to_repair() -> list[Replica]:
    """Replicas with faulty slots that may try again by themselves, and those that were well for long since they did."""
    return list(Replica.objects.filter(_due()).select_related("cluster").order_by("pk"))


def _due() -> Q:
    due = Q(repaired_at__isnull=True)
    for repairs in range(MAX_REPAIRS):
        waited = Now() - Value(timedelta(seconds=REPAIR_AFTER_S * 2**repairs))
        due |= Q(repairs=repairs, repaired_at__lt=waited)
    faulty = Exists(ReplicaSlot.objects.filter(replica=OuterRef("pk")).exclude(fault=""))
    sick = ~Q(state=ReplicaState.OFFLINE) & Q(faulty, repairs__lt=MAX_REPAIRS) & due
    well = Q(
        ~faulty, state=ReplicaState.READY, repairs__gt=0, repaired_at__lt=Now() - Value(timedelta(seconds=WELL_AGAIN_S))
    )
    return sick | well


@transaction.atomic
def replica_repair_itself(*, replica: Replica) -> bool:
    """One further try at a replica's faulty slots, or its count taken back; whether a repair was begun.

    After `MAX_REPAIRS` it waits for a person.
    """
    row = replica_locked(replica.pk)
    if not Replica.objects.filter(_due(), pk=row.pk).exists():
        return False  # another conductor just did it
    faulty = list(row.slots.exclude(fault="").order_by("slot"))
    if not faulty:
        Replica.objects.filter(pk=row.pk).update(repairs=0)
        return False
    number = row.repairs + 1
    reason = f"repair {number} of {MAX_REPAIRS}: {row.error}"[:500]
    begun = _repair(row, faulty, actor=CONDUCTOR, reason=reason)
    Replica.objects.filter(pk=row.pk).update(repairs=number, repaired_at=Now())
    last = " (the last by itself: then a person has to)" if number == MAX_REPAIRS else ""
    _record(row, CONDUCTOR, f"repair {number} begun{last}" if begun else "no version to repair it to", reason)
    return begun


def _repair(replica: Replica, slots: list[ReplicaSlot], *, actor: Actor, reason: str) -> bool:
    begun = False
    for slot in slots:
        version, source = _mended(replica, slot)
        if version is None:
            continue
        slot_target(
            replica=replica,
            slot=WeightSlot(slot.slot),
            version=version,
            source=source,
            actor=actor,
            reason=reason,
            repair=True,
        )
        begun = True
    return begun


def _mended(replica: Replica, slot: ReplicaSlot) -> tuple[PolicyVersion | None, DesiredSource | None]:
    """What a slot is repaired to, and why: what it should hold or holds; where that is bad and the slot is at fault,
    what its cluster's users are answered with.
    """
    source = DesiredSource(slot.desired_source) if slot.desired_source else None
    version = slot.desired_version or slot.current_version
    if version_good(version) or not slot.fault:
        return (version, source) if version_good(version) else (None, None)
    lane = Lane.objects.filter(cluster=replica.cluster_id).select_related("promoted_version").first()
    promoted = lane.promoted_version if lane is not None else None
    return (promoted, DesiredSource.PROMOTED) if version_good(promoted) else (None, None)


def _require_slot(replica: Replica, slot: WeightSlot) -> None:
    if not replica.slots.filter(slot=slot.value).exists():
        raise Invalid(f"replica {replica.name} has no slot {slot.value}", "slot")


def _record(replica: Replica, actor: Actor, action: str, reason: str) -> None:
    project_id = replica.cluster.project_id
    event_append(
        project_id=project_id,
        topic=project_topic(project_id),
        event_type=EventType.REPLICA_STEERED,
        actor=actor,
        reason=reason,
        data={
            "replica": str(replica.pk),
            "cluster": replica.cluster.slug,
            "name": replica.name,
            "action": action,
        },
    )
