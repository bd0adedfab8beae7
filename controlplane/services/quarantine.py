"""Quarantine: a version that was found bad, all that descends from it, and what users said about it."""

from __future__ import annotations

from uuid import UUID

from django.db import connection
from django.db.models import Exists, OuterRef
from django.db.models.functions import Now

from controlplane.models import Generation, PolicyVersion, ReplicaSlot
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import slot_target
from controlplane.services.locks import replicas_lock
from controlplane.services.retractions import feedback_quarantine
from controlplane.states import WeightSlot

_DESCENDANTS = """
WITH RECURSIVE family(id) AS (
    SELECT id FROM controlplane_policyversion WHERE id = %s
    UNION
    SELECT child.id FROM controlplane_policyversion child JOIN family ON child.parent_id = family.id
)
SELECT id FROM family
"""
_TAINTED = """
WITH RECURSIVE line(id, parent_id, quarantined_at) AS (
    SELECT id, parent_id, quarantined_at FROM controlplane_policyversion WHERE id = %s
    UNION
    SELECT up.id, up.parent_id, up.quarantined_at
    FROM controlplane_policyversion up JOIN line ON up.id = line.parent_id
)
SELECT id FROM line WHERE quarantined_at IS NOT NULL LIMIT 1
"""


def version_quarantine(*, version: PolicyVersion) -> int:
    """Mark the version and all its descendants, and set their feedback aside. Returns how many versions were marked.

    No slot is told to hold any of them from here on; what a replica holds of them stays until the place is needed. In
    the caller's transaction, which says why in its event.
    """
    replicas_lock(version.lineage.project_id)
    family = version_family(version)
    # First the mark, then the slots: whoever wants to give one of them to a slot meanwhile finds it marked.
    marked = PolicyVersion.objects.filter(id__in=family, quarantined_at__isnull=True).update(quarantined_at=Now())
    for slot in ReplicaSlot.objects.filter(desired_version__in=family).select_related("replica").order_by("pk"):
        slot_target(
            replica=slot.replica, slot=WeightSlot(slot.slot), version=None, source=None, actor=SYSTEM, unpin=True
        )
    answered = Exists(Generation.objects.filter(version=OuterRef("pk")))
    for member in PolicyVersion.objects.filter(answered, id__in=family):
        feedback_quarantine(version=member)
    return marked


def version_family(version: PolicyVersion) -> list[UUID]:
    """The version and all that descend from it."""
    with connection.cursor() as cursor:
        cursor.execute(_DESCENDANTS, [version.id])
        return [row[0] for row in cursor.fetchall()]


def quarantined_in_line(version: PolicyVersion) -> PolicyVersion | None:
    """The version itself or an ancestor that was found bad; None when the whole line is in good standing."""
    with connection.cursor() as cursor:
        cursor.execute(_TAINTED, [version.id])
        row = cursor.fetchone()
    return PolicyVersion.objects.get(id=row[0]) if row else None
