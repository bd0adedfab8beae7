"""The database's clock: the only one that slots, holds, horizons and deadlines are compared with."""

from __future__ import annotations

from datetime import datetime

from django.db import connection


def database_now() -> datetime:
    """The time of this statement, in UTC. The clocks of the processes may be wrong; this one is everybody's."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        row = cursor.fetchone()
    assert row is not None
    now: datetime = row[0]
    return now
