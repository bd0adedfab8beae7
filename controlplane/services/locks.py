"""Advisory locks that live as long as their transaction: on decisions about a run, on clusters, on repeated calls.

Whoever takes a run's and the clusters' takes the run's first.
"""

from __future__ import annotations

import hashlib
import uuid

from django.db import connection


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
