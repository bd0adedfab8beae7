"""Which version each replica of a lane's cluster should hold: the promoted one, in one of its slots."""

from __future__ import annotations

from functools import partial

from controlplane.conductor.looks import Looks
from controlplane.models import Lane
from controlplane.services.residency import promoted_place

_lanes = Looks("lane")


def lanes_place() -> int:
    """Every lane's promoted version on its replicas; how many were targeted.

    No replica is given a quarantined version, though another lane may have left it promoted.
    """
    good = Lane.objects.filter(promoted_version__isnull=False, promoted_version__quarantined_at__isnull=True)
    targeted: list[int] = []

    def place(lane: Lane) -> None:
        targeted.append(promoted_place(lane=lane))

    for lane in good.select_related("promoted_version"):
        _lanes.at(lane.pk, partial(place, lane))
    return sum(targeted)
