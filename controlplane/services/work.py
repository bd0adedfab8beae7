"""Units of work: enqueued with the change that wants them, claimed under a lease, finished under a fence.

A unit's row is its outbox entry and its lease. All times are the database's. Every function that ends or extends an
attempt names the claim's fence; a claim that is no longer the newest is refused with StaleFence, so that a worker
that was taken for dead can do no harm when it comes back.
"""

from __future__ import annotations

import random
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from controlplane.errors import Conflict, ControlPlaneError, StaleFence
from controlplane.models import Attempt, Run, WorkUnit
from controlplane.services.events import SYSTEM, Actor, conductor_nudge, event_append, project_topic, run_topic
from controlplane.states import AttemptState, EventType, WorkKind, WorkState
from rl_core.errors import RlCoreError

MAX_FAILURES = 5
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 60.0
LAPSED, CANCELLED = "lease_lapsed", "cancelled"


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's hold on a unit. `fence` is what makes it the newest, or not."""

    unit_id: uuid.UUID
    kind: WorkKind
    ref: uuid.UUID
    run_id: uuid.UUID | None
    project_id: uuid.UUID
    fence: int


def work_enqueue(
    *,
    kind: WorkKind,
    ref: uuid.UUID,
    project_id: uuid.UUID,
    run: Run | None = None,
    max_failures: int = MAX_FAILURES,
    delay_s: float = 0.0,
) -> WorkUnit:
    """Want `ref` worked on, in the caller's transaction. There is one unit for each (kind, ref): asking twice is once.

    Raises: RuntimeError outside a transaction.
    """
    work_enqueue_many(kind=kind, refs=[ref], project_id=project_id, run=run, max_failures=max_failures, delay_s=delay_s)
    return WorkUnit.objects.get(kind=kind, ref=ref)


def work_enqueue_many(
    *,
    kind: WorkKind,
    refs: Iterable[uuid.UUID],
    project_id: uuid.UUID,
    run: Run | None = None,
    max_failures: int = MAX_FAILURES,
    delay_s: float = 0.0,
) -> None:
    """`work_enqueue` for many rows at once. Raises: RuntimeError outside a transaction."""
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("work_enqueue needs the transaction of the change that wants the work")
    units = [WorkUnit(kind=kind, ref=ref, run=run, project_id=project_id, max_failures=max_failures) for ref in refs]
    WorkUnit.objects.bulk_create(units, ignore_conflicts=True)
    if delay_s > 0:
        fresh = WorkUnit.objects.filter(pk__in=[unit.pk for unit in units], sends=0, fence=0)
        fresh.update(next_send_at=Now() + Value(timedelta(seconds=delay_s)))
    conductor_nudge()


def work_claim(*, unit_id: uuid.UUID, worker: str) -> Claim | None:
    """Take a queued unit, or None when somebody else has it, it is ended, or it is still backing off.

    A unit that was not sent since it was last queued can be taken only once it is due: a message left over from an
    earlier sending does not cut a backoff short.
    """
    with transaction.atomic():
        taken = (
            WorkUnit.objects.filter(pk=unit_id, state=WorkState.QUEUED)
            .filter(Q(sends__gt=0) | Q(next_send_at__lte=Now()))
            .update(state=WorkState.LEASED, fence=F("fence") + 1, lease_until=_lease_end(), worker=worker[:200])
        )
        if not taken:
            return None
        unit = WorkUnit.objects.get(pk=unit_id)
        Attempt.objects.create(unit=unit, number=unit.fence, worker=worker[:200])
    return Claim(unit.pk, WorkKind(unit.kind), unit.ref, unit.run_id, unit.project_id, unit.fence)


def work_claim_more(*, kind: WorkKind, worker: str, limit: int) -> list[Claim]:
    """Take up to `limit` further due units of a kind, oldest first; for workers that drive many at once."""
    due = WorkUnit.objects.filter(kind=kind, state=WorkState.QUEUED).filter(Q(sends__gt=0) | Q(next_send_at__lte=Now()))
    ids = list(due.order_by("created_at", "pk").values_list("pk", flat=True)[:limit])
    claims = [work_claim(unit_id=unit_id, worker=worker) for unit_id in ids]
    return [claim for claim in claims if claim is not None]


def work_renew(claim: Claim) -> None:
    """Extend the lease. Raises: StaleFence: stop at once, another attempt has the unit or it is not wanted."""
    if not _held(claim).update(lease_until=_lease_end()):
        raise _stale(claim)


@contextmanager
def work_fenced(claim: Claim) -> Iterator[None]:
    """A transaction in which the claim is sure to be the newest until it commits. Raises: StaleFence."""
    with transaction.atomic():
        if not _held(claim).select_for_update().exists():
            raise _stale(claim)
        yield


def work_finish(claim: Claim) -> None:
    """The unit is done; call it in the transaction of its effects. Raises: StaleFence."""
    with transaction.atomic():
        ended = _held(claim).update(state=WorkState.DONE, lease_until=None, finished_at=Now(), error_code="", error="")
        if not ended:
            raise _stale(claim)
        _close_attempt(claim, AttemptState.SUCCEEDED)
        conductor_nudge()


def work_yield(claim: Claim, *, delay_s: float = 0.0, code: str = "") -> None:
    """The slice ended and the unit is not: queue it again. No failure. `code` is for whoever goes on.

    Raises: StaleFence.
    """
    with transaction.atomic():
        ended = _held(claim).update(**_queued(delay_s))
        if not ended:
            raise _stale(claim)
        _close_attempt(claim, AttemptState.YIELDED, error_code=code)
        conductor_nudge()


def work_fail(claim: Claim, error: BaseException) -> WorkState:
    """Record a failed attempt: queued again with backoff, or dead when retrying cannot help or was tried enough.

    Errors of our trees count as failed and are retried as their `retryable` says; any other is a bug, counts as
    errored with its traceback, and is retried up to the same cap. Raises: StaleFence.
    """
    expected = isinstance(error, RlCoreError | ControlPlaneError)
    code = str(getattr(error, "code", "") or type(error).__name__)[:64] if expected else type(error).__name__[:64]
    text = _storable(str(error))[:1000]
    with transaction.atomic():
        unit = _held(claim).select_for_update().first()
        if unit is None:
            raise _stale(claim)
        _close_attempt(
            claim,
            AttemptState.FAILED if expected else AttemptState.ERRORED,
            error_code=code,
            error=text,
            trace="" if expected else _storable("".join(traceback.format_exception(error))),
        )
        retryable = bool(getattr(error, "retryable", False)) if expected else True
        return _put_back(unit, code=code, text=text, retryable=retryable)


def work_sweep(*, limit: int = 200) -> int:
    """Take back units whose lease ran out; each counts as a failure. Returns how many.

    The worker may still be alive: its fence is refused from here on.
    """
    lapsed = WorkUnit.objects.filter(state=WorkState.LEASED, lease_until__lt=Now())
    swept = 0
    for unit_id in lapsed.values_list("pk", flat=True)[:limit]:
        with transaction.atomic():
            unit = lapsed.filter(pk=unit_id).select_for_update(skip_locked=True).first()
            if unit is None:
                continue
            text = f"worker {unit.worker} let its lease run out: it died, hung, or lost the database"
            Attempt.objects.filter(unit=unit, number=unit.fence, state=AttemptState.RUNNING).update(
                state=AttemptState.LAPSED, error_code=LAPSED, error=text, finished_at=Now()
            )
            _put_back(unit, code=LAPSED, text=text, retryable=True)
            swept += 1
    return swept


def work_due(*, limit: int) -> list[WorkUnit]:
    """Queued units that are to be sent now, longest due first."""
    due = WorkUnit.objects.filter(state=WorkState.QUEUED, next_send_at__lte=Now())
    return list(due.order_by("next_send_at", "created_at", "pk")[:limit])


def work_sent(units: Iterable[WorkUnit]) -> None:
    """Note that the broker took these units: they are sent again after REDELIVERY_S unless claimed before."""
    delay = Value(timedelta(seconds=settings.REDELIVERY_S))
    for unit in units:
        WorkUnit.objects.filter(pk=unit.pk, state=WorkState.QUEUED, fence=unit.fence, sends=unit.sends).update(
            next_send_at=Now() + delay, sends=F("sends") + 1
        )


def work_cancel(
    *, kind: WorkKind | None = None, refs: Iterable[uuid.UUID] | None = None, run: Run | None = None
) -> int:
    """Units that are no longer wanted, queued or leased; whoever works on one is refused. Returns how many."""
    if kind is None and run is None:
        raise RuntimeError("work_cancel needs a kind or a run")
    units = WorkUnit.objects.filter(state__in=[WorkState.QUEUED, WorkState.LEASED])
    asked = {"kind": kind, "ref__in": None if refs is None else list(refs), "run": run}
    units = units.filter(**{name: value for name, value in asked.items() if value is not None})
    with transaction.atomic():
        ids = list(units.select_for_update().order_by("pk").values_list("pk", flat=True))
        # Their workers are refused from here on, so nobody else will close these.
        Attempt.objects.filter(unit__in=ids, state=AttemptState.RUNNING).update(
            state=AttemptState.FAILED, error_code=CANCELLED, error="the unit is no longer wanted", finished_at=Now()
        )
        return WorkUnit.objects.filter(pk__in=ids).update(
            state=WorkState.CANCELLED, lease_until=None, finished_at=Now()
        )


def work_replay(*, unit: WorkUnit, actor: Actor, reason: str) -> WorkUnit:
    """Give a dead unit a fresh set of attempts. Raises: Conflict when it is not dead."""
    with transaction.atomic():
        revived = WorkUnit.objects.filter(pk=unit.pk, state=WorkState.DEAD).update(
            failures=0, finished_at=None, **_queued(0.0)
        )
        if not revived:
            raise Conflict(f"work unit {unit.pk} is {unit.state}: only a dead unit can be replayed")
        event_append(
            project_id=unit.project_id,
            topic=_topic(unit),
            event_type=EventType.WORK_REPLAYED,
            actor=actor,
            reason=reason,
            data={"unit": str(unit.pk), "kind": unit.kind, "ref": str(unit.ref)},
        )
        conductor_nudge()
    unit.refresh_from_db()
    return unit


def _held(claim: Claim) -> QuerySet[WorkUnit]:
    return WorkUnit.objects.filter(pk=claim.unit_id, state=WorkState.LEASED, fence=claim.fence)


def _lease_end() -> CombinedExpression:
    return Now() + Value(timedelta(seconds=settings.LEASE_S))


def _stale(claim: Claim) -> StaleFence:
    return StaleFence(f"{claim.kind.value} unit {claim.unit_id}: attempt {claim.fence} is no longer the newest; stop")


def _queued(delay_s: float) -> dict[str, object]:
    return {
        "state": WorkState.QUEUED,
        "lease_until": None,
        "sends": 0,
        "next_send_at": Now() + Value(timedelta(seconds=delay_s)),
    }


def _put_back(unit: WorkUnit, *, code: str, text: str, retryable: bool) -> WorkState:
    """Queue a locked unit after a failure, or let it die."""
    failures = unit.failures + 1
    row = WorkUnit.objects.filter(pk=unit.pk)
    conductor_nudge()
    if retryable and failures < unit.max_failures:
        row.update(failures=failures, error_code=code, error=text, **_queued(backoff_s(failures)))
        return WorkState.QUEUED
    row.update(
        failures=failures, error_code=code, error=text, state=WorkState.DEAD, lease_until=None, finished_at=Now()
    )
    event_append(
        project_id=unit.project_id,
        topic=_topic(unit),
        event_type=EventType.WORK_DIED,
        actor=SYSTEM,
        reason=text[:500],
        data={"unit": str(unit.pk), "kind": unit.kind, "ref": str(unit.ref), "code": code, "failures": failures},
    )
    return WorkState.DEAD


def backoff_s(failures: int) -> float:
    """Seconds to wait after the n-th failure: doubling, capped, jittered by half so that failures spread out."""
    return float(min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))


def _close_attempt(
    claim: Claim, state: AttemptState, *, error_code: str = "", error: str = "", trace: str = ""
) -> None:
    Attempt.objects.filter(unit_id=claim.unit_id, number=claim.fence).update(
        state=state, error_code=error_code, error=error, traceback=trace[-20_000:], finished_at=Now()
    )


def _storable(text: str) -> str:
    """A text that may quote anything, without what PostgreSQL does not hold: NUL characters, lone surrogates."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def _topic(unit: WorkUnit) -> str:
    return run_topic(unit.run_id) if unit.run_id else project_topic(unit.project_id)
