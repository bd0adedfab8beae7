"""Units of work against the real PostgreSQL: claims, fences, leases, backoff, death, replay."""

import threading
import uuid
from collections import Counter
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models import F, Value
from django.db.models.functions import Now

from controlplane.errors import Conflict, StaleFence, Unavailable
from controlplane.models import Attempt, Event, WorkUnit
from controlplane.services.work import (
    Claim,
    backoff_s,
    work_cancel,
    work_claim,
    work_claim_more,
    work_due,
    work_enqueue,
    work_fail,
    work_fenced,
    work_finish,
    work_renew,
    work_replay,
    work_sent,
    work_sweep,
    work_yield,
)
from controlplane.states import AttemptState, EventType, WorkKind, WorkState
from rl_core.errors import SpecError
from tests.domain_factories import TESTER, make_project, make_unit


def claimed(**values) -> Claim:
    claim = work_claim(unit_id=make_unit(**values).pk, worker="w")
    assert claim is not None
    return claim


def lapse(claim: Claim) -> None:
    WorkUnit.objects.filter(pk=claim.unit_id).update(lease_until=Now() - Value(timedelta(seconds=1)))


def make_due(unit_id: uuid.UUID) -> None:
    WorkUnit.objects.filter(pk=unit_id).update(next_send_at=Now())


def unit_of(claim: Claim) -> WorkUnit:
    return WorkUnit.objects.get(pk=claim.unit_id)


@pytest.mark.django_db
def test_asking_twice_is_one_unit():
    project, ref = make_project(), uuid.uuid4()
    first = work_enqueue(kind=WorkKind.EXPORT, ref=ref, project_id=project.pk)
    assert work_enqueue(kind=WorkKind.EXPORT, ref=ref, project_id=project.pk).pk == first.pk


@pytest.mark.django_db(transaction=True)
def test_enqueueing_needs_the_transaction_of_its_change():
    project = make_project()
    with pytest.raises(RuntimeError, match="transaction"):
        work_enqueue(kind=WorkKind.EXPORT, ref=uuid.uuid4(), project_id=project.pk)
    with transaction.atomic():
        work_enqueue(kind=WorkKind.EXPORT, ref=uuid.uuid4(), project_id=project.pk)
        transaction.set_rollback(True)
    assert not WorkUnit.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_of_many_claimers_at_once_one_gets_each_unit():
    project = make_project()
    units = [make_unit(project) for _ in range(6)]
    won: list[uuid.UUID] = []
    barrier = threading.Barrier(8)

    def claim_all() -> None:
        barrier.wait()
        try:
            for unit in units:
                if work_claim(unit_id=unit.pk, worker=threading.current_thread().name) is not None:
                    won.append(unit.pk)
        finally:
            connection.close()

    threads = [threading.Thread(target=claim_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(won) == dict.fromkeys([unit.pk for unit in units], 1)
    assert Attempt.objects.count() == len(units)


@pytest.mark.django_db
def test_every_claim_carries_the_next_fence():
    claim = claimed()
    assert claim.fence == 1
    work_yield(claim)
    again = work_claim(unit_id=claim.unit_id, worker="x")
    assert again is not None
    assert again.fence == 2
    assert [a.state for a in Attempt.objects.order_by("number")] == [AttemptState.YIELDED, AttemptState.RUNNING]


@pytest.mark.django_db
@pytest.mark.parametrize("end", [work_finish, work_yield, work_renew, lambda claim: work_fail(claim, ValueError())])
def test_an_older_fence_is_refused_everywhere(end):
    old = claimed()
    lapse(old)
    assert work_sweep() == 1
    make_due(old.unit_id)
    new = work_claim(unit_id=old.unit_id, worker="new")
    assert new is not None
    with pytest.raises(StaleFence):
        end(old)
    with pytest.raises(StaleFence), work_fenced(old):
        pytest.fail("a stale claim got into its transaction")
    assert unit_of(new).state == WorkState.LEASED
    work_finish(new)
    assert unit_of(new).state == WorkState.DONE


@pytest.mark.django_db
def test_a_lapsed_lease_counts_as_a_failure_and_goes_back():
    claim = claimed()
    assert work_sweep() == 0
    lapse(claim)
    assert work_sweep() == 1
    unit = unit_of(claim)
    assert (unit.state, unit.failures, unit.error_code) == (WorkState.QUEUED, 1, "lease_lapsed")
    assert Attempt.objects.get(unit=unit).state == AttemptState.LAPSED


@pytest.mark.django_db
def test_a_late_finish_of_a_lease_that_nobody_took_back_counts():
    claim = claimed()
    lapse(claim)
    work_finish(claim)
    assert unit_of(claim).state == WorkState.DONE
    assert work_sweep() == 0


@pytest.mark.django_db
def test_renewing_moves_the_end_of_the_lease():
    claim = claimed()
    lapse(claim)
    work_renew(claim)
    assert work_sweep() == 0
    assert WorkUnit.objects.filter(pk=claim.unit_id, lease_until__gt=Now()).exists()


@pytest.mark.django_db
def test_a_retryable_error_backs_off_and_keeps_others_from_jumping_the_wait():
    claim = claimed(sends=2)  # messages of earlier sendings may still lie in the broker
    assert work_fail(claim, Unavailable("the store is away")) == WorkState.QUEUED
    unit = unit_of(claim)
    assert unit.error_code == "unavailable"
    assert unit not in work_due(limit=10)
    assert work_claim(unit_id=unit.pk, worker="early") is None
    assert work_claim_more(kind=WorkKind.EXPORT, worker="early", limit=5) == []
    make_due(unit.pk)
    assert work_claim(unit_id=unit.pk, worker="in time") is not None


@pytest.mark.django_db
def test_an_expected_error_that_no_retry_helps_is_dead_at_once():
    claim = claimed()
    assert work_fail(claim, SpecError("no such thing")) == WorkState.DEAD
    attempt = Attempt.objects.get()
    assert (attempt.state, attempt.error_code, attempt.traceback) == (AttemptState.FAILED, "spec_invalid", "")


@pytest.mark.django_db
def test_a_bug_is_errored_with_its_traceback_and_dies_at_the_cap():
    unit = make_unit(max_failures=3)
    states = []
    for _ in range(3):
        make_due(unit.pk)
        claim = work_claim(unit_id=unit.pk, worker="w")
        assert claim is not None
        try:
            raise KeyError("poison")
        except KeyError as error:
            states.append(work_fail(claim, error))
    assert states == [WorkState.QUEUED, WorkState.QUEUED, WorkState.DEAD]
    assert "test_a_bug_is_errored" in Attempt.objects.order_by("number").first().traceback
    assert {a.state for a in Attempt.objects.all()} == {AttemptState.ERRORED}
    assert Event.objects.filter(type=EventType.WORK_DIED).count() == 1
    assert work_claim(unit_id=unit.pk, worker="w") is None


@pytest.mark.django_db
def test_a_bug_is_written_down_whatever_its_text_quotes():
    claim = claimed()
    assert work_fail(claim, ValueError("a\x00b\ud800c")) == WorkState.QUEUED
    assert unit_of(claim).error == "a\ufffdb?c"
    assert "a\ufffdb?c" in Attempt.objects.get().traceback


@pytest.mark.django_db
def test_a_unit_that_kills_its_workers_dies_too():
    unit = make_unit(max_failures=2)
    for _ in range(2):
        make_due(unit.pk)
        claim = work_claim(unit_id=unit.pk, worker="w")
        assert claim is not None
        lapse(claim)
        work_sweep()
    unit.refresh_from_db()
    assert unit.state == WorkState.DEAD


@pytest.mark.django_db
def test_a_person_replays_a_dead_unit_and_only_a_dead_one():
    claim = claimed()
    with pytest.raises(Conflict):
        work_replay(unit=unit_of(claim), actor=TESTER, reason="why not")
    work_fail(claim, SpecError("no"))
    unit = work_replay(unit=unit_of(claim), actor=TESTER, reason="fixed the spec")
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 0)
    assert unit in work_due(limit=10)
    event = Event.objects.get(type=EventType.WORK_REPLAYED)
    assert (event.actor, event.reason) == ("tester", "fixed the spec")


@pytest.mark.django_db
def test_what_was_sent_is_sent_again_only_after_a_while_or_when_it_was_queued_anew():
    unit = make_unit()
    assert work_due(limit=10) == [unit]
    work_sent([unit])
    assert work_due(limit=10) == []
    make_due(unit.pk)
    assert work_due(limit=10) == [unit]
    claim = work_claim(unit_id=unit.pk, worker="w")
    assert claim is not None
    assert work_due(limit=10) == []
    work_sent([unit])  # the dispatcher's note comes after the claim and must not touch it
    work_yield(claim)
    work_sent([unit])  # nor after the unit was queued again
    assert [u.pk for u in work_due(limit=10)] == [unit.pk]


@pytest.mark.django_db
def test_a_cancelled_unit_refuses_whoever_worked_on_it():
    claim = claimed()
    assert work_cancel(kind=WorkKind.EXPORT, refs=[claim.ref]) == 1
    with pytest.raises(StaleFence):
        work_finish(claim)
    assert unit_of(claim).state == WorkState.CANCELLED
    with pytest.raises(RuntimeError):
        work_cancel()


def test_backoff_doubles_is_capped_and_jittered():
    waits = {failures: [backoff_s(failures) for _ in range(200)] for failures in (1, 2, 3, 20)}
    assert all(0.5 <= wait <= 1.0 for wait in waits[1])
    assert all(2.0 <= wait <= 4.0 for wait in waits[3])
    assert all(30.0 <= wait <= 60.0 for wait in waits[20])
    assert len(set(waits[2])) > 100


@pytest.mark.django_db(transaction=True)
def test_the_fence_holds_until_the_effects_commit():
    """A sweep that comes while a worker commits waits for it, and then finds the unit done."""
    claim = claimed()
    lapse(claim)
    inside, swept = threading.Event(), threading.Event()

    def sweep() -> None:
        inside.wait()
        try:
            work_sweep()
        finally:
            connection.close()
            swept.set()

    thread = threading.Thread(target=sweep)
    thread.start()
    with work_fenced(claim):
        WorkUnit.objects.filter(pk=claim.unit_id).update(sends=F("sends") + 1)
        inside.set()
        swept.wait(0.3)
        work_finish(claim)
    thread.join()
    assert unit_of(claim).state == WorkState.DONE
    assert Attempt.objects.get().state == AttemptState.SUCCEEDED


@pytest.mark.django_db
def test_an_attempt_at_a_cancelled_unit_is_over():
    claim = claimed()
    assert work_cancel(kind=claim.kind, refs=[claim.ref]) == 1
    attempt = Attempt.objects.get()
    assert (attempt.state, attempt.error_code) == (AttemptState.FAILED, "cancelled")
    assert attempt.finished_at is not None
    with pytest.raises(StaleFence):
        work_fail(claim, SpecError("too late"))
    attempt.refresh_from_db()
    assert attempt.error_code == "cancelled"
