"""Which weights the replicas of a lane's cluster hold: a candidate is loaded beside what answers, and withdrawn."""

from __future__ import annotations

from collections import defaultdict
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef

from controlplane.errors import Conflict
from controlplane.models import Lane, PolicyVersion, Replica, ReplicaSlot
from controlplane.selectors.answering import ANSWERING, answering_slots, on_loan, there
from controlplane.services.events import CONDUCTOR, Actor
from controlplane.services.fleet import slot_target
from controlplane.services.loans import loan_give_up
from controlplane.services.locks import replica_locked, replicas_lock
from controlplane.states import DesiredSource, ReplicaState, WeightSlot

PRESENT = (ReplicaState.READY, ReplicaState.RECONCILING, ReplicaState.POISONED)


def candidate_load(*, lane: Lane, version: PolicyVersion, actor: Actor, reason: str) -> int:
    """Target one slot of each replica that the promoted version does not need. Returns how many were targeted.

    Raises: Conflict when no replica of the cluster can hold two versions at once.
    """
    replicas_lock(lane.project_id)
    slots = _spare_slots(lane)
    if not slots:
        raise Conflict(f"cluster {lane.cluster.slug} has no replica that can hold two versions at once")
    for slot in slots:
        loan_give_up(replica_id=slot.replica_id, slot=WeightSlot(slot.slot), actor=actor, reason=reason)
        if slot.desired_version_id == version.id and slot.current_version_id == version.id:
            _mark(slot, DesiredSource.CANDIDATE)
            continue
        slot_target(
            replica=slot.replica,
            slot=WeightSlot(slot.slot),
            version=version,
            source=DesiredSource.CANDIDATE,
            actor=actor,
            reason=reason,
        )
    return len(slots)


def candidate_withdraw(*, lane: Lane, version: PolicyVersion, actor: Actor) -> None:
    """No slot is told to hold the candidate any more; what is on its way is superseded, what is there stays there."""
    replicas_lock(lane.project_id)
    wanted = ReplicaSlot.objects.filter(
        replica__cluster=lane.cluster_id, desired_version=version, desired_source=DesiredSource.CANDIDATE
    )
    for slot in wanted.select_related("replica").order_by("pk"):
        slot_target(replica=slot.replica, slot=WeightSlot(slot.slot), version=None, source=None, actor=actor)


def resident_require(*, lane: Lane, version: PolicyVersion) -> None:
    """Every replica that is there holds the version. Raises: Conflict, saying how many do not."""
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster_id, replica__state__in=PRESENT)
    replicas = set(slots.values_list("replica_id", flat=True))
    missing = replicas - set(slots.filter(current_version=version, fault="").values_list("replica_id", flat=True))
    if missing or not replicas:
        raise Conflict(
            f"{len(missing)} of {len(replicas)} replica(s) of {lane.cluster.slug} do not hold {version} yet; "
            "wait for the transfer"
        )


def resident_somewhere(*, lane: Lane, version: PolicyVersion) -> bool:
    """Whether some replica could answer with the version now."""
    return ReplicaSlot.objects.filter(
        answering_slots(), ~on_loan(), replica__cluster=lane.cluster_id, current_version=version
    ).exists()


def loads_beside(*, lane: Lane) -> bool:
    """Whether a replica that answers now can take a further version while it goes on answering with what it has."""
    return any(slot.replica.state in ANSWERING for slot in _spare_slots(lane))


def promoted_place(*, lane: Lane) -> int:
    """Target the replicas that no slot tells to hold the promoted version; how many.

    New ones, those of a new lane, and those that have but one slot for what they answer with: they load the version in
    place of what they hold. A slot that holds a candidate is left alone, and so is a person's pin.
    """
    told = ReplicaSlot.objects.filter(replica=OuterRef("pk"), desired_version=lane.promoted_version_id)
    present = Replica.objects.filter(~Exists(told), cluster=lane.cluster_id, state__in=PRESENT)
    return sum(_place(lane, replica_id) for replica_id in present.order_by("pk").values_list("pk", flat=True))


def slots_relabel(*, lane: Lane, promoted: PolicyVersion) -> None:
    """After the lane's pointer moved: say which slots answer and which only hold. Pins and loans stay what they are."""
    replicas_lock(lane.project_id)
    kept = (DesiredSource.PINNED, DesiredSource.LENT)
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster_id).exclude(desired_source__in=kept)
    wished = slots.filter(desired_version__isnull=False)
    wished.filter(desired_version=promoted).update(desired_source=DesiredSource.PROMOTED)
    wished.exclude(desired_version=promoted).update(desired_source=DesiredSource.CANDIDATE)


@transaction.atomic
def _place(lane: Lane, replica_id: UUID) -> bool:
    replica = replica_locked(replica_id)
    slots = list(replica.slots.all())
    if any(slot.desired_version_id == lane.promoted_version_id for slot in slots):
        return False
    # A replica's only slot is for what answers, whatever it was told to hold before.
    taken = (DesiredSource.PINNED, DesiredSource.CANDIDATE) if len(slots) > 1 else (DesiredSource.PINNED,)
    free = [slot for slot in slots if slot.desired_source not in taken]
    if not free:
        return False
    # What is lent is taken back last of all.
    chosen = min(free, key=lambda slot: (slot.desired_source == DesiredSource.LENT, slot.slot != WeightSlot.DEFAULT))
    slot = WeightSlot(chosen.slot)
    loan_give_up(replica_id=replica.pk, slot=slot, reason=f"lane {lane.slug} needs the slot")
    slot_target(
        replica=replica,
        slot=slot,
        version=lane.promoted_version,
        source=DesiredSource.PROMOTED,
        actor=CONDUCTOR,
        reason=f"lane {lane.slug} serves it",
    )
    return True


def _spare_slots(lane: Lane) -> list[ReplicaSlot]:
    by_replica: dict[UUID, list[ReplicaSlot]] = defaultdict(list)
    slots = ReplicaSlot.objects.filter(there("replica__"), replica__cluster=lane.cluster_id).select_related("replica")
    for slot in slots.order_by("replica_id", "-slot"):
        by_replica[slot.replica_id].append(slot)
    spare = []
    for held in by_replica.values():
        kept = max(held, key=lambda slot: _claim(slot, lane))
        free = [slot for slot in held if slot is not kept and slot.desired_source != DesiredSource.PINNED]
        spare += free[:1]
    return spare


def _claim(slot: ReplicaSlot, lane: Lane) -> tuple[bool, ...]:
    """How much the promoted version needs the slot."""
    promoted = lane.promoted_version_id
    return (
        not slot.fault,
        slot.current_version_id == promoted,
        slot.desired_version_id == promoted,
        slot.slot == WeightSlot.DEFAULT,
    )


def _mark(slot: ReplicaSlot, source: DesiredSource) -> None:
    ReplicaSlot.objects.filter(pk=slot.pk).update(desired_source=source)
