"""The dispatcher: due units go to the broker by name; a broker that is down or forgets loses nothing."""

from datetime import timedelta

import pytest
from celery import Celery
from django.db.models import Value
from django.db.models.functions import Now
from kombu.exceptions import OperationalError

import workers
from controlplane import dispatch
from controlplane.celery import app
from controlplane.dispatch import ROUTES, Dispatcher
from controlplane.models import WorkUnit
from controlplane.services.work import work_claim, work_finish
from controlplane.states import Queue, WorkKind, WorkState
from tests.domain_factories import make_unit


@pytest.fixture
def no_broker(monkeypatch):
    """A broker's address where nothing listens."""
    away = Celery("away", broker="redis://127.0.0.1:1/0")
    away.conf.update(broker_transport_options=app.conf.broker_transport_options)
    monkeypatch.setattr(dispatch, "app", away)


@pytest.fixture
def broker():
    """The broker of the tests, with empty queues."""
    with app.connection_for_write() as connection:
        for queue in Queue:
            connection.default_channel.queue_purge(queue.value)
    yield
    with app.connection_for_write() as connection:
        for queue in Queue:
            connection.default_channel.queue_purge(queue.value)


def waiting(queue: Queue) -> int:
    with app.connection_for_write() as connection:
        return connection.default_channel._size(queue.value)


def test_every_kind_of_work_has_a_task_and_a_queue():
    assert set(ROUTES) == set(WorkKind)
    assert workers.__all__
    for route in ROUTES.values():
        assert route.task in app.tasks
        assert route.queue in Queue
    assert {route.queue for route in ROUTES.values()} == set(Queue)


@pytest.mark.django_db
def test_due_units_are_sent_once_and_again_only_after_a_while(broker):
    make_unit(kind=WorkKind.SCORE)
    make_unit(kind=WorkKind.TRAIN)
    dispatcher = Dispatcher()
    assert dispatcher.dispatch() == 2
    assert (waiting(Queue.SCORE), waiting(Queue.TRAIN)) == (1, 1)
    assert dispatcher.dispatch() == 0
    WorkUnit.objects.update(next_send_at=Now() - Value(timedelta(seconds=1)))  # the broker forgot them
    assert dispatcher.dispatch() == 2


@pytest.mark.django_db
def test_without_a_broker_nothing_is_lost_and_one_line_says_so(no_broker, monkeypatch, broker_log):
    unit = make_unit(kind=WorkKind.SCORE)
    dispatcher = Dispatcher()
    assert dispatcher.dispatch() == 0
    assert dispatcher.dispatch() == 0  # waits, and does not try again at once
    unit.refresh_from_db()
    assert (unit.state, unit.sends) == (WorkState.QUEUED, 0)
    monkeypatch.setattr(dispatcher, "_retry_at", 0.0)
    assert dispatcher.dispatch() == 0
    assert [event for event, _ in broker_log] == ["broker_unreachable"]
    assert "start it or set BROKER_URL" in broker_log[0][1]["next_step"]


@pytest.mark.django_db
def test_when_the_broker_is_back_work_goes_on(no_broker, monkeypatch, broker_log):
    units = [make_unit(kind=WorkKind.SCORE) for _ in range(3)]
    dispatcher = Dispatcher()
    dispatcher.dispatch()
    sent = []
    monkeypatch.setattr(dispatch, "_send", sent.append)
    monkeypatch.setattr(dispatcher, "_retry_at", 0.0)
    assert dispatcher.dispatch() == 3
    assert [event for event, _ in broker_log] == ["broker_unreachable", "broker_back"]
    for unit in sent:
        claim = work_claim(unit_id=unit.pk, worker="w")
        assert claim is not None
        work_finish(claim)
    assert {WorkUnit.objects.get(pk=unit.pk).state for unit in units} == {WorkState.DONE}


@pytest.mark.django_db
def test_what_was_sent_before_the_broker_broke_off_is_noted(monkeypatch, broker_log):
    units = [make_unit(kind=WorkKind.SCORE) for _ in range(3)]
    sent = []

    def send(unit: WorkUnit) -> None:
        if len(sent) == 2:
            raise OperationalError("gone")
        sent.append(unit.pk)

    monkeypatch.setattr(dispatch, "_send", send)
    assert Dispatcher().dispatch() == 2
    assert {unit.pk: WorkUnit.objects.get(pk=unit.pk).sends for unit in units} == {
        unit.pk: int(unit.pk in sent) for unit in units
    }


@pytest.fixture
def broker_log(monkeypatch):
    """What the dispatcher said."""
    lines: list[tuple[str, dict]] = []

    class Log:
        def error(self, event, **fields):
            lines.append((event, fields))

        info = error

    monkeypatch.setattr(dispatch, "log", Log())
    return lines
