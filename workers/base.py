"""The base of all tasks: claim a unit, hold its lease, bind the log, translate errors. One of the two such places."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock

import structlog
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError

from controlplane.celery import GRACE_S, TASK_TIME_LIMIT_S, app
from controlplane.dispatch import ROUTES
from controlplane.errors import StaleFence
from controlplane.services.work import Claim, work_claim, work_fail, work_yield
from controlplane.states import WorkKind
from rl_core.store import ObjectStore, open_store
from workers.leases import LeaseKeeper

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Attempt:
    """One attempt in this process. `lost` is set when somebody else may have the unit: stop, and write nothing."""

    claim: Claim
    keeper: LeaseKeeper
    lost: Event = field(default_factory=Event)
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call when the lease is lost, from another thread; at once if it was lost already."""
        with self._lock:
            if not self.lost.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def lose(self) -> None:
        """The lease is gone."""
        with self._lock:
            self.lost.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Raises: StaleFence when the lease was lost."""
        if self.lost.is_set():
            raise StaleFence(f"attempt {self.claim.fence} at {self.claim.kind} {self.claim.unit_id} lost its lease")


Work = Callable[[Attempt], None]


def unit_task(kind: WorkKind, *, limit_s: int = TASK_TIME_LIMIT_S) -> Callable[[Work], Work]:
    """Make a function the Celery task of a kind of unit. It ends its unit itself, or raises, within the limit."""

    def register(work: Work) -> Work:
        @app.task(  # type: ignore[untyped-decorator]
            name=ROUTES[kind].task, soft_time_limit=limit_s - GRACE_S, time_limit=limit_s
        )
        @functools.wraps(work)
        def task(unit_id: str) -> None:
            work_on(uuid.UUID(unit_id), work)

        return work

    return register


def work_on(unit_id: uuid.UUID, work: Work) -> None:
    """Claim the unit and work on it, unless somebody else does. Every error ends here, recorded."""
    claim = work_claim(unit_id=unit_id, worker=worker_name())
    if claim is None:
        return
    with bound(claim), LeaseKeeper() as keeper:
        attempt = Attempt(claim, keeper)
        keeper.hold(claim, on_loss=attempt.lose)
        try:
            work(attempt)
        except StaleFence as error:
            log.warning("attempt_superseded", error=str(error))
        except (SystemExit, KeyboardInterrupt):
            _hand_back(claim)
            raise
        except (Exception, SoftTimeLimitExceeded) as error:  # noqa: BLE001  # the attempt keeps what happened
            fail(claim, error)
        finally:
            keeper.release(claim)


def fail(claim: Claim, error: BaseException) -> None:
    """Record a failed attempt, unless it is not the newest any more or the database is gone: the lease lapses then."""
    try:
        state = work_fail(claim, error)
    except StaleFence as stale:
        log.warning("attempt_superseded", error=str(stale), after=f"{type(error).__name__}: {error}"[:500])
    except (DatabaseError, InterfaceError) as trouble:
        log.error("failure_not_recorded", error=str(error)[:300], database=str(trouble)[:200])
    else:
        log.warning("attempt_failed", error=f"{type(error).__name__}: {error}"[:500], unit_state=state.value)


def _hand_back(claim: Claim) -> None:
    """The process is told to end: let somebody else have the unit at once."""
    try:
        work_yield(claim)
    except (StaleFence, DatabaseError, InterfaceError) as error:
        log.warning("unit_not_handed_back", error=str(error)[:200])


@contextmanager
def bound(claim: Claim) -> Iterator[None]:
    """Bind what every log line of an attempt says."""
    names = {
        "kind": claim.kind.value,
        "unit": str(claim.unit_id),
        "run": str(claim.run_id or ""),
        "attempt": claim.fence,
        "worker": worker_name(),
    }
    with structlog.contextvars.bound_contextvars(**names):
        yield


def worker_name() -> str:
    """Host and process: what an attempt's row names."""
    return f"{socket.gethostname()}:{os.getpid()}"


@functools.cache
def store() -> ObjectStore:
    """The object store, opened once a process."""
    from django.conf import settings

    return open_store(settings.STORE_URL)
