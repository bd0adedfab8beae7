"""Which version each replica of a lane's cluster should hold: the promoted one, in one of its slots."""

from __future__ import annotations

from controlplane.models import Lane
from controlplane.services.residency import promoted_place


def lanes_place() -> int:
    """Every lane's promoted version on its replicas; how many were targeted.

    No replica is given a quarantined version, though another lane may have left it promoted.
    """
    good = Lane.objects.filter(promoted_version__isnull=False, promoted_version__quarantined_at__isnull=True)
    return sum(promoted_place(lane=lane) for lane in good.select_related("promoted_version"))
