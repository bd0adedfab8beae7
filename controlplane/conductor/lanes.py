"""Which version each replica of a lane's cluster should hold: the promoted one, in one of its slots."""

from __future__ import annotations

from controlplane.models import Lane, Replica
from controlplane.services.events import CONDUCTOR
from controlplane.services.fleet import slot_target
from controlplane.states import DesiredSource, ReplicaState, WeightSlot

PRESENT = (ReplicaState.READY, ReplicaState.RECONCILING, ReplicaState.POISONED)


def lanes_place() -> int:
    """Target replicas that no slot tells to hold the promoted version: new ones, and those of a new lane.

    Returns how many were targeted. A slot that holds a candidate is left alone, and so is a person's pin. No replica is
    given a quarantined version, though another lane may have left it promoted.
    """
    targeted = 0
    good = Lane.objects.filter(promoted_version__isnull=False, promoted_version__quarantined_at__isnull=True)
    for lane in good.select_related("promoted_version", "cluster"):
        for replica in Replica.objects.filter(cluster=lane.cluster, state__in=PRESENT).prefetch_related("slots"):
            targeted += _place(lane, replica)
    return targeted


def _place(lane: Lane, replica: Replica) -> bool:
    slots = list(replica.slots.all())
    if any(slot.desired_version_id == lane.promoted_version_id for slot in slots):
        return False
    taken = (DesiredSource.CANDIDATE, DesiredSource.PINNED)
    free = sorted((slot.slot for slot in slots if slot.desired_source not in taken), reverse=True)
    if not free:
        return False
    slot = WeightSlot.DEFAULT if WeightSlot.DEFAULT in free else WeightSlot(free[0])
    slot_target(
        replica=replica,
        slot=slot,
        version=lane.promoted_version,
        source=DesiredSource.PROMOTED,
        actor=CONDUCTOR,
        reason=f"lane {lane.slug} serves it",
    )
    return True
