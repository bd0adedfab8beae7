"""Retention: versions whose weights nobody may ask for any more are retired, and what led to them alone is let go.

Whoever gives a version's weights a use calls `version_hold` in that transaction. A version is retired under a lock
that waits for no one, after its needs were read again: of the two, one comes first and the other sees it. A retired
version never comes back, so that what leads to those which are left can only be kept or made, never missed.
"""

from __future__ import annotations

import uuid
from typing import Final

import structlog
from django.db import connection, transaction
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import PolicyVersion, Publication
from controlplane.selectors.versions_needed import versions_needed
from controlplane.selectors.weight_paths import edge_of, kept_edges
from controlplane.services.locks import retention_try_lock
from controlplane.states import VersionState

log = structlog.get_logger(__name__)

BATCH: Final = 200


def version_hold(version: PolicyVersion, *, good: bool = False) -> None:
    """Make sure that the version's weights stay, in the transaction of the row that needs them.

    With `good` it must not have been found bad either, and cannot be until the transaction ends.
    Raises: Conflict when its weights were given up, or it is not good; RuntimeError outside a transaction.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("version_hold needs the transaction of the row that needs the version")
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT retired_at, quarantined_at FROM {PolicyVersion._meta.db_table} WHERE id = %s "  # noqa: S608
            f"FOR {'SHARE' if good else 'KEY SHARE'}",
            [version.pk],
        )
        row = cursor.fetchone()
    if good and row is not None and row[1] is not None:
        raise Conflict(f"version {version.ref} was found bad: no replica may hold it")
    if row is None or row[0] is not None:
        raise Conflict(f"version {version.ref} is retired: its weights were given up; choose a later or a served one")


def versions_retire() -> int:
    """Retire versions that nobody needs, oldest first, so many at once; how many."""
    return sum(_retire(version.pk) for version in versions_retirable())


def versions_retirable() -> list[PolicyVersion]:
    """The oldest versions that nobody needs and that are not retired yet."""
    present = PolicyVersion.objects.filter(state=VersionState.COMMITTED, retired_at__isnull=True)
    return list(present.exclude(pk__in=versions_needed()).order_by("created_at", "pk")[:BATCH])


def _retire(version_id: uuid.UUID) -> bool:
    """Retire one version unless it is in somebody's hands, or came into use meanwhile."""
    with transaction.atomic():
        rows = PolicyVersion.objects.filter(pk=version_id, retired_at__isnull=True)
        if not rows.select_for_update(skip_locked=True).exists() or versions_needed([version_id]):
            return False
        rows.update(retired_at=Now())
    log.info("version_retired", version=str(version_id))
    return True


def publications_release() -> int:
    """Let go of publications that lead to no version that is left; how many. Their objects become garbage."""
    with transaction.atomic():
        if not retention_try_lock():
            return 0
        drop: list[uuid.UUID] = []
        for weight_format in Publication.objects.values_list("format", flat=True).distinct():
            drop += _releasable(weight_format)
        return Publication.objects.filter(pk__in=drop, deleted_at__isnull=True).update(deleted_at=Now())


def _releasable(weight_format: str) -> list[uuid.UUID]:
    left = PolicyVersion.objects.filter(state=VersionState.COMMITTED, retired_at__isnull=True).values("root")
    live = Publication.objects.filter(format=weight_format, published_at__isnull=False, deleted_at__isnull=True)
    rows = {row.pk: row for row in live}
    needed = set(live.filter(version__root__in=left).values_list("root", flat=True))
    kept, lost = kept_edges(map(edge_of, rows.values()), needed=needed)
    if lost:
        log.error("versions_out_of_reach", format=weight_format, roots=sorted(lost)[:5], count=len(lost))
    keys = {rows[row_id].manifest_key for row_id in kept}  # runs on one model share its snapshot
    return [row.pk for row in rows.values() if row.manifest_key not in keys]
