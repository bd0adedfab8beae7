"""Advisory locks that live as long as their transaction: who decides about a run, one at a time."""

from __future__ import annotations

import hashlib
import uuid

from django.db import connection


def run_try_lock(run_id: uuid.UUID) -> bool:
    """Take a run's lock until the transaction ends, or say at once that somebody else has it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_key(run_id)])
        row = cursor.fetchone()
    return bool(row and row[0])


def run_lock(run_id: uuid.UUID) -> None:
    """Wait for a run's lock: a person's change of a run comes between two looks of the conductor, never into one.

    Else each could hold a row that the other wants, with the run's log locked in the other order.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_key(run_id)])


def _key(run_id: uuid.UUID) -> int:
    return int.from_bytes(hashlib.sha256(f"run/{run_id}".encode()).digest()[:8], "big", signed=True)
