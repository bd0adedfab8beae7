"""Feedback in sets: as many statements for many as for one, each item with an outcome of its own, one event a topic."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from controlplane.errors import Conflict, Gone, Invalid, Malformed, NotFound, TooLarge
from controlplane.models import Event, Feedback, FeedbackReceipt, Generation
from controlplane.services.entries import Receipt, Sender
from controlplane.services.events import lane_topic, project_topic
from controlplane.services.feedback import feedback_receive_many
from controlplane.services.lanes import lane_create
from controlplane.services.payloads import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, batch_items
from controlplane.services.signals import signal_define
from controlplane.states import FeedbackState, SignalType
from rl_core.store import open_store
from rl_core.types import ClusterRole
from tests.domain_factories import make_cluster
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def receive(world, bodies, sender="key", **options):
    items = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
    return feedback_receive_many(sender=Sender(world.project, sender, ACTOR), items=items, **options)


def seen(outcomes):
    return [(one.status, one.duplicate) if isinstance(one, Receipt) else type(one) for one in outcomes]


def test_one_bad_item_spoils_no_other(store):
    world, other = lane_world(), lane_world()
    generation, foreign, erased = world.generate(store), other.generate(store), world.generate(store)
    Generation.objects.filter(id=erased.id).update(erased_at=datetime.now(UTC))
    good = thumbs(generation.id)
    bodies = [
        good,
        {"event_id": "x"},
        b"{nonsense",
        b'{"a": "\xff"}',
        thumbs(uuid.uuid4()),
        thumbs(generation.id, signal="applause"),
        thumbs(generation.id, value="yes"),
        thumbs(foreign.id),
        thumbs(erased.id),
        thumbs("not an id"),
        good,
        {**good, "value": False},
        thumbs(generation.id, dry_run=True),
        b'{"event_id": "\\ud800"}',
        b"[" * 50_000,
    ]
    outcomes = receive(world, bodies)
    assert seen(outcomes) == [
        (201, False),
        Invalid,
        Malformed,
        Invalid,
        (202, False),
        NotFound,
        Invalid,
        NotFound,
        Gone,
        Invalid,
        (200, True),
        Conflict,
        (200, False),
        Malformed,
        Invalid,
    ]
    assert Feedback.objects.filter(project=world.project).count() == 2
    assert outcomes[10].feedback_id == outcomes[0].feedback_id


def test_many_cost_the_statements_of_one(store):
    world = lane_world()
    generation = world.generate(store)

    def statements(count):
        with CaptureQueriesContext(
            connection,
        ) as captured:
            outcomes = receive(world, [thumbs(generation.id) for _ in range(count)])
        assert {one.status for one in outcomes} == {201}
        return [query["sql"].split()[0] for query in captured.captured_queries]

    assert statements(200) == statements(1)
    assert len(statements(1)) <= 8


def test_a_batch_is_one_event_a_topic(store):
    world = lane_world()
    other = make_cluster(world.project, slug="other", role=ClusterRole.SERVING)
    second = lane_create(project=world.project, slug="b", cluster=other, model=world.model, actor=ACTOR)
    here = world.generate(store)
    world.lane, first = second, world.lane
    there = world.generate(store)
    receive(
        world, [thumbs(here.id), thumbs(here.id), thumbs(there.id), thumbs(uuid.uuid4()), thumbs(here.id, signal="no")]
    )
    told = {
        event.topic_id: event.data for event in Event.objects.filter(project=world.project, type="feedback.received")
    }
    assert told[lane_topic(first.id)] == {"count": 2, "states": {"joined": 2}, "signals": {"thumbs": 2}}
    assert told[lane_topic(second.id)]["state"] == "joined"
    assert told[project_topic(world.project.id)]["state"] == "pending"
    assert len(told) == 3


def test_a_batch_without_anything_new_says_nothing(store):
    world = lane_world()
    bodies = [thumbs(world.generate(store).id) for _ in range(3)]
    receive(world, bodies)
    before = Event.objects.filter(project=world.project).count()
    assert seen(receive(world, bodies)) == [(200, True)] * 3
    assert Event.objects.filter(project=world.project).count() == before
    assert list(FeedbackReceipt.objects.filter(project=world.project).values_list("repeats", flat=True)) == [1, 1, 1]


def test_what_was_accepted_stays_accepted_when_its_target_is_gone(store):
    world = lane_world()
    generation = world.generate(store)
    body = thumbs(generation.id)
    receive(world, [body])
    Generation.objects.filter(id=generation.id).update(erased_at=datetime.now(UTC))
    assert seen(receive(world, [body, thumbs(generation.id)])) == [(200, True), Gone]


def test_a_dry_run_of_a_known_event_is_told_so_and_stores_nothing(store):
    world = lane_world()
    body = thumbs(world.generate(store).id)
    dry = {**body, "dry_run": True}
    assert seen(receive(world, [dry])) == [(200, False)]
    receive(world, [body])
    # Another body: that it is a dry run is a part of it.
    assert seen(receive(world, [dry])) == [Conflict]
    assert Feedback.objects.filter(project=world.project).count() == 1


def test_what_the_database_refuses_is_refused_alone(store):
    """A rule of the database that the checks before it do not know: here a trigger."""
    world = lane_world()
    generation = world.generate(store)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.actor_hash = 'poison' THEN RAISE SQLSTATE '22023'; END IF; RETURN NEW; END $$"
        )
        cursor.execute(
            "CREATE TRIGGER refuse_poison BEFORE INSERT ON controlplane_feedback "
            "FOR EACH ROW EXECUTE FUNCTION refuse_poison()"
        )
    poison = thumbs(generation.id, actor={"hash": "poison"})
    bodies = [thumbs(generation.id), poison, thumbs(generation.id)]
    assert seen(receive(world, bodies)) == [(201, False), Invalid, (201, False)]
    assert FeedbackReceipt.objects.filter(project=world.project).count() == 2
    assert seen(receive(world, [poison])) == [Invalid]


@pytest.mark.django_db(transaction=True)
def test_the_same_batches_from_many_threads_in_any_order_are_stored_once(store):
    world = lane_world()
    generation = world.generate(store)
    bodies = [thumbs(generation.id) for _ in range(120)]
    outcomes, barrier = [], threading.Barrier(6)

    def send(number):
        barrier.wait()
        try:
            outcomes.append(receive(world, bodies if number % 2 else bodies[::-1]))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(one.status for batch in outcomes for one in batch)
    assert statuses == [200] * 600 + [201] * 120
    assert Feedback.objects.filter(project=world.project).count() == 120
    assert set(FeedbackReceipt.objects.filter(project=world.project).values_list("repeats", flat=True)) == {5}


@pytest.mark.parametrize("kind", ["boolean", "number", "category"])
def test_values_come_back_as_they_were_sent(store, kind):
    world = lane_world()
    generation = world.generate(store)
    ranges = {"minimum": -5, "maximum": 1e9} if kind == "number" else {}
    categories = ["bad", "good"] if kind == "category" else None
    signal_define(project=world.project, slug="s", value_type=SignalType(kind), categories=categories, **ranges)
    values = {"boolean": [True, False], "number": [0, -5, 0.1, 123456789.25, 1e9], "category": ["bad", "good"]}[kind]
    bodies = [
        thumbs(generation.id, signal="s", value=value, comment='a "quote" \\ {x} \u2028 \U0001f600', tags={"k": "v"})
        for value in values
    ]
    for value, receipt in zip(values, receive(world, bodies), strict=True):
        row = Feedback.objects.get(id=receipt.feedback_id)
        assert (row.value, type(row.value)) == (value, type(value))
        assert (row.comment, row.tags) == ('a "quote" \\ {x} \u2028 \U0001f600', {"k": "v"})


@pytest.mark.parametrize(
    ("occurred_at", "refused"),
    [
        ("0001-01-01T00:00:00+14:00", True),
        ("1999-12-31T23:59:59Z", True),
        ("2000-01-01T00:00:00Z", False),
        ("9999-12-31T23:59:59-14:00", True),
        ("2024-01-01T00:00:00", True),
        (timedelta(minutes=4), False),
        (timedelta(minutes=20), True),
    ],
)
def test_times_that_no_clock_shows_are_refused(store, occurred_at, refused):
    world = lane_world()
    if isinstance(occurred_at, timedelta):
        occurred_at = (datetime.now(UTC) + occurred_at).isoformat()
    [outcome] = receive(world, [thumbs(world.generate(store).id, occurred_at=occurred_at)])
    assert isinstance(outcome, Invalid) is refused
    if refused:
        assert outcome.field == "occurred_at"
    else:
        assert Feedback.objects.get(id=outcome.feedback_id).occurred_at == datetime.fromisoformat(occurred_at)


def test_lane_redactions_hold_for_texts_of_feedback(store):
    world = lane_world()
    world.lane.redactions = {"email": r"[\w.]+@[\w.]+"}
    world.lane.save(update_fields=["redactions"])
    body = thumbs(
        world.generate(store).id,
        comment="ask ada@example.org",
        demonstration="Dear ada@example.org",
        tags={"who": "ada@example.org", "plan": "free"},
    )
    plain = thumbs(uuid.uuid4(), comment="fine", demonstration="Dear Ada")
    first, second = receive(world, [body, plain])
    row = Feedback.objects.get(id=first.feedback_id)
    assert (row.comment, row.demonstration, row.tags) == ("ask [email]", "", {"who": "[email]", "plan": "free"})
    row = Feedback.objects.get(id=second.feedback_id)
    assert (row.comment, row.demonstration) == ("fine", "Dear Ada")


def test_a_quarantined_versions_feedback_is_set_aside(store):
    world = lane_world()
    generation = world.generate(store)
    world.lane.promoted_version.quarantined_at = datetime.now(UTC)
    world.lane.promoted_version.save(update_fields=["quarantined_at"])
    [outcome] = receive(world, [thumbs(generation.id)])
    assert (outcome.status, outcome.join) == (201, FeedbackState.QUARANTINED)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", Malformed),
        (b"\xff", Malformed),
        (b"{}", Invalid),
        (b"[]", Invalid),
        (b'{"items": {}}', Invalid),
        (b'{"items": []}', Invalid),
        (b'{"items": [1], "more": 1}', Invalid),
        (b'{"items": [NaN]}', Malformed),
        (b'{"items": [' + b"1," * MAX_BATCH_ITEMS + b"1]}", Invalid),
        (b'{"items": [' + b"9" * 5000 + b', "\\ud800"]}', Malformed),
        (b"[" * 200_000, Invalid),
        (b'{"items": [' + b"[" * 200_000, Malformed),
        (b" " * (MAX_BATCH_BYTES + 1), TooLarge),
    ],
)
def test_a_batch_that_is_none_is_refused_as_a_whole(body, error):
    with pytest.raises(error):
        batch_items(body)


def test_half_a_surrogate_pair_or_bad_bytes_spoil_one_item_alone(store):
    world = lane_world()
    good = json.dumps(thumbs(world.generate(store).id)).encode()
    for bad in (b'{"comment": "\\ud800"}', b'{"comment": "\xff"}', b'{"comment": "\\u0000"}'):
        items = batch_items(b'{"items": [' + bad + b"," + good + b"]}")
        outcomes = feedback_receive_many(sender=Sender(world.project, str(bad), ACTOR), items=items)
        assert seen(outcomes) in ([Invalid, (201, False)], [Malformed, (201, False)]), bad
