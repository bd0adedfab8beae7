"""Locks that live as long as their transaction, and the one order in which they are taken.

First a lane, which covers its releases; advisory locks (a run's before those of the clusters); a cluster; its lending
policy; replicas by id, and with them the units of their transfers; last the logs that events are appended to, a lane's
before its project's. A replica's lock covers its slots, its loan, its transfers, and that the versions which its slots
are given stay good: whoever changes one of these takes it first, and whoever changes those of several replicas takes
all of the project's at once. So of two transactions that meet one waits, and never each for the other.
"""

from __future__ import annotations

import hashlib
import uuid

from django.db import connection

from controlplane.models import Replica, Transfer, WorkUnit
from controlplane.states import UNDER_WAY, WorkKind, WorkState


def run_try_lock(run_id: uuid.UUID) -> bool:
    """Take a run's lock until the transaction ends, or say at once that somebody else has it."""
    return _try(f"run/{run_id}")


def run_lock(run_id: uuid.UUID) -> None:
    """Wait for a run's lock: a person's change of a run comes between two looks of the conductor, never into one.

    Else each could hold a row that the other wants, with the run's log locked in the other order.
    """
    _wait(f"run/{run_id}")


def clusters_try_lock(project_id: uuid.UUID) -> bool:
    """Take the lock under which runs of a project take clusters: of two that want the same, one sees the other."""
    return _try(f"clusters/{project_id}")


def clusters_lock(project_id: uuid.UUID) -> None:
    """Wait for that lock."""
    _wait(f"clusters/{project_id}")


def call_try_lock(name: str) -> bool:
    """Take the lock of a call that is answered once, or say at once that the same call has not ended."""
    return _try(f"call/{name}")


def retention_try_lock() -> bool:
    """Take the lock under which publications are let go, or say at once that somebody else does that."""
    return _try("retention")


def replica_locked(replica_id: uuid.UUID) -> Replica:
    """The replica as it is now, locked. Rows that only refer to it need not wait. Raises: DoesNotExist."""
    rows = Replica.objects.select_for_update(no_key=True, of=("self",)).select_related("cluster__project")
    row = rows.get(pk=replica_id)
    _units_lock(replica=replica_id)
    return row


def replicas_lock(project_id: uuid.UUID) -> None:
    """Lock every replica of a project, for changes that may touch several of them."""
    rows = Replica.objects.select_for_update(no_key=True, of=("self",)).filter(cluster__project=project_id)
    list(rows.order_by("pk").values_list("pk", flat=True))
    _units_lock(replica__cluster__project=project_id)


def _units_lock(**of: object) -> None:
    """Who moves slots may cancel what is on its way to them, after it has appended to a log for another."""
    under_way = Transfer.objects.filter(state__in=UNDER_WAY, **of)
    units = WorkUnit.objects.filter(kind=WorkKind.TRANSFER, ref__in=under_way.values("pk"))
    open_units = units.filter(state__in=[WorkState.QUEUED, WorkState.LEASED]).select_for_update().order_by("pk")
    list(open_units.values_list("pk", flat=True))


def _try(name: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_key(name)])
        row = cursor.fetchone()
    return bool(row and row[0])


def _wait(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_key(name)])


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
