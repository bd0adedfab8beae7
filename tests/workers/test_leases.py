"""Leases in a worker: renewed while it works, and when they are lost it stops and writes nothing."""

import threading
import time
from datetime import timedelta

import pytest
from django.db.models import Value
from django.db.models.functions import Now

from controlplane.errors import StaleFence, Unavailable
from controlplane.models import Attempt, WorkUnit
from controlplane.services.work import work_cancel, work_claim, work_finish, work_sweep
from controlplane.states import AttemptState, WorkKind, WorkState
from tests.domain_factories import make_unit
from workers.base import work_on
from workers.leases import LeaseKeeper

pytestmark = pytest.mark.django_db(transaction=True)


def lapse(unit_id) -> None:
    WorkUnit.objects.filter(pk=unit_id).update(lease_until=Now() - Value(timedelta(seconds=1)))


def test_a_held_lease_is_renewed():
    claim = work_claim(unit_id=make_unit().pk, worker="w")
    losses = []
    with LeaseKeeper(lease_s=0.3) as keeper:
        keeper.hold(claim, on_loss=lambda: losses.append(1))
        lapse(claim.unit_id)
        deadline = time.monotonic() + 60
        while not WorkUnit.objects.filter(pk=claim.unit_id, lease_until__gt=Now()).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert work_sweep() == 0
    assert losses == []


def test_a_lease_that_somebody_else_has_is_told_at_once_and_once():
    claim = work_claim(unit_id=make_unit().pk, worker="w")
    losses = []
    lost = threading.Event()
    with LeaseKeeper(lease_s=0.15) as keeper:
        keeper.hold(claim, on_loss=lambda: (losses.append(1), lost.set()))
        work_cancel(kind=WorkKind.EXPORT, refs=[claim.ref])
        assert lost.wait(60)
        time.sleep(0.2)
    assert losses == [1]


def test_a_released_lease_is_not_renewed():
    claim = work_claim(unit_id=make_unit().pk, worker="w")
    losses = []
    with LeaseKeeper(lease_s=0.15) as keeper:
        keeper.hold(claim, on_loss=lambda: losses.append(1))
        keeper.release(claim)
        work_finish(claim)
        time.sleep(0.2)
    assert losses == []


def test_a_unit_that_is_taken_is_left_alone():
    unit = make_unit()
    work_claim(unit_id=unit.pk, worker="other")
    calls = []
    work_on(unit.pk, calls.append)
    unit.refresh_from_db()
    assert calls == []
    assert (unit.state, unit.worker, unit.fence) == (WorkState.LEASED, "other", 1)


def test_work_ends_its_unit():
    unit = make_unit()
    work_on(unit.pk, lambda attempt: work_finish(attempt.claim))
    unit.refresh_from_db()
    assert unit.state == WorkState.DONE


@pytest.mark.parametrize(
    ("error", "state", "kept"),
    [(Unavailable("store away"), AttemptState.FAILED, ""), (KeyError("bug"), AttemptState.ERRORED, "Traceback")],
)
def test_errors_are_translated_into_the_attempt(error, state, kept):
    unit = make_unit()

    def work(attempt):
        raise error

    work_on(unit.pk, work)
    attempt = Attempt.objects.get(unit=unit)
    assert (attempt.state, attempt.traceback[: len(kept)]) == (state, kept)
    unit.refresh_from_db()
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 1)


def test_whoever_lost_the_lease_writes_nothing(settings):
    settings.LEASE_S = 0.3
    unit = make_unit()
    told = threading.Event()

    def work(attempt):
        attempt.on_loss(told.set)
        lapse(unit.pk)
        assert work_sweep() == 1
        assert told.wait(60)
        with pytest.raises(StaleFence):
            attempt.check()
        raise ValueError("too late")

    work_on(unit.pk, work)
    unit.refresh_from_db()
    assert (unit.state, unit.failures, unit.error_code) == (WorkState.QUEUED, 1, "lease_lapsed")
    assert Attempt.objects.get(unit=unit).state == AttemptState.LAPSED


def test_a_process_that_is_told_to_end_hands_its_unit_back():
    unit = make_unit()

    def work(attempt):
        raise SystemExit

    with pytest.raises(SystemExit):
        work_on(unit.pk, work)
    unit.refresh_from_db()
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 0)
