"""What a lane keeps of its users' content: the share of generations, and what is redacted from it."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F

from controlplane.errors import Invalid, StaleRevision
from controlplane.models import Lane
from controlplane.services.events import Actor, require_reason
from controlplane.services.lanes import lane_locked, lane_record
from controlplane.services.redaction import redactions_check


@transaction.atomic
def recording_update(
    *,
    lane: Lane,
    record_share: float,
    redactions: dict[str, str],
    actor: Actor,
    reason: str,
    expected_revision: int | None = None,
) -> Lane:
    """Set both, for what ends from now on; what was stored before stays as it is.

    Raises: Invalid for a share outside [0, 1] or an expression that is none; StaleRevision.
    """
    require_reason(reason, "say why what is kept changes")
    if not 0.0 <= record_share <= 1.0:
        raise Invalid(f"record_share must be in [0, 1], not {record_share:g}", "record_share")
    redactions_check(redactions)
    locked = lane_locked(lane.pk)
    if expected_revision is not None and locked.revision != expected_revision:
        raise StaleRevision(f"the lane is at revision {locked.revision}, not {expected_revision}; read it again")
    Lane.objects.filter(pk=lane.pk).update(record_share=record_share, redactions=redactions, revision=F("revision") + 1)
    names = sorted(redactions)
    lane_record(locked, actor=actor, reason=reason, change="recording set", record_share=record_share, redactions=names)
    locked.refresh_from_db()
    return locked
