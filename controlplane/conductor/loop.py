"""The conductor's process: duties at their intervals and on every nudge, then whatever is due goes to the broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import psycopg
import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection

from controlplane.conductor.duties import Duty, duties, fleet_duties, slow_duties, storage_duties
from controlplane.dispatch import Dispatcher
from controlplane.services.events import NUDGE_CHANNEL

log = structlog.get_logger(__name__)

# A burst of nudges is one look: whatever came meanwhile is seen by it.
_SETTLE_S = 0.02
_BACKOFF_CAP_S = 10.0


class Conductor:
    """Runs until told to stop. Any number of them may run: locks and compare-and-sets make that harmless."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._dispatcher = Dispatcher()

    def stop(self) -> None:
        """End soon; safe from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Work until stopped. The database may come and go."""
        beside = [
            threading.Thread(target=self._run_beside, args=(rows,), name=f"conductor-{name}", daemon=True)
            for name, rows in (("fleet", fleet_duties()), ("slow", slow_duties()), ("storage", storage_duties()))
        ]
        for thread in beside:
            thread.start()
        log.info("conductor_started", tick_s=settings.CONDUCTOR_TICK_S)
        rounds = _Rounds(duties())
        nudges = _Nudges()
        nudged = True
        while not self._stop.is_set():
            rounds.go(nudged=nudged)
            _guarded("dispatch", self._dispatcher.dispatch)
            nudged = nudges.wait(settings.CONDUCTOR_TICK_S, self._stop)
        nudges.close()
        for thread in beside:
            thread.join(timeout=5)
        log.info("conductor_stopped")

    def _run_beside(self, rows: Sequence[Duty]) -> None:
        rounds = _Rounds(rows)
        while not self._stop.wait(0.25):
            rounds.go(nudged=False)
        connection.close()


class _Rounds:
    """Which duties are due."""

    def __init__(self, rows: Sequence[Duty]) -> None:
        self._rows = rows
        self._due = {row.name: 0.0 for row in rows}

    def go(self, *, nudged: bool) -> None:
        for row in self._rows:
            if time.monotonic() >= self._due[row.name] or (nudged and row.on_nudge):
                failed = not _guarded(row.name, row.action)
                self._due[row.name] = time.monotonic() + row.every_s * (4 if failed else 1)


def _guarded(name: str, action: Any) -> bool:
    """Do one duty; whether it went well. Nothing that one duty meets may end the others."""
    try:
        action()
    except (DatabaseError, InterfaceError) as error:
        log.error("database_trouble", duty=name, error=str(error).strip().splitlines()[0][:200])
        connection.close()
        return False
    except Exception:  # the last line of defence: a bug that one run meets must not stop the other runs
        log.exception("duty_failed", duty=name)
        return False
    return True


class _Nudges:
    """Waits for NOTIFY on a connection of its own; without one it waits for the clock alone."""

    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None
        self._retry_at = 0.0
        self._failures = 0

    def wait(self, timeout_s: float, stop: threading.Event) -> bool:
        """Whether a nudge came within the time."""
        if self._connection is None and not self._connect():
            stop.wait(timeout_s)
            return False
        assert self._connection is not None
        try:
            came = any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
            if came:
                stop.wait(_SETTLE_S)
                for _ in self._connection.notifies(timeout=0):
                    pass
        except psycopg.Error as error:
            log.warning("nudges_lost", error=str(error).strip()[:200])
            self.close()
            return False
        return came

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            params = connection.get_connection_params()
            keys = ("host", "port", "dbname", "user", "password")
            wanted = {key: params[key] for key in keys if params.get(key)}
            self._connection = psycopg.connect(**wanted, autocommit=True, connect_timeout=3)
            self._connection.execute(f"LISTEN {NUDGE_CHANNEL}")
        except psycopg.Error as error:
            self._failures += 1
            self._retry_at = time.monotonic() + min(_BACKOFF_CAP_S, 0.5 * 2**self._failures)
            log.warning("nudges_unavailable", error=str(error).strip()[:200])
            return False
        self._failures = 0
        return True
