"""Keeping leases: one thread renews everything a process works on, and tells at once when something was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection

from controlplane.errors import StaleFence
from controlplane.services.work import Claim, work_renew

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Held:
    claim: Claim
    on_loss: Callable[[], None]
    renewed_at: float


class LeaseKeeper:
    """A context: claims that are held in it are renewed at a third of the lease.

    A claim is lost when its fence was refused, or when the database could not be asked for as long as a lease lasts:
    somebody else may have the unit then. `on_loss` is called once, from the keeper's thread; it must only signal.
    """

    def __init__(self, *, lease_s: float | None = None) -> None:
        self._lease_s = settings.LEASE_S if lease_s is None else lease_s
        self._held: dict[object, _Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def hold(self, claim: Claim, *, on_loss: Callable[[], None]) -> None:
        """Renew the claim from now on."""
        with self._lock:
            self._held[claim.unit_id] = _Held(claim, on_loss, time.monotonic())

    def release(self, claim: Claim) -> None:
        """Renew it no more: its attempt is over."""
        with self._lock:
            self._held.pop(claim.unit_id, None)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._lease_s / 3):
                with self._lock:
                    held = list(self._held.values())
                for one in held:
                    self._renew(one)
                connection.close()
        finally:
            connection.close()

    def _renew(self, one: _Held) -> None:
        started = time.monotonic()
        try:
            work_renew(one.claim)
            one.renewed_at = started
            return
        except StaleFence:
            reason = "superseded"
        except (DatabaseError, InterfaceError) as error:
            connection.close()
            if time.monotonic() - one.renewed_at < self._lease_s:
                log.warning("lease_not_renewed", unit=str(one.claim.unit_id), error=str(error)[:200])
                return
            reason = "database unreachable for a whole lease"
        with self._lock:
            present = self._held.pop(one.claim.unit_id, None)
        if present is not None:
            log.warning("lease_lost", unit=str(one.claim.unit_id), attempt=one.claim.fence, reason=reason)
            one.on_loss()
