"""Single events that come at the same time are done together, and each caller gets its own outcome."""

from __future__ import annotations

import json
import threading
import time
import uuid

import pytest
from django.db import connections

from controlplane.errors import Conflict, Invalid
from controlplane.models import Event, Feedback
from controlplane.services.entries import Receipt, Sender
from controlplane.services.gathering import Gathering, feedback_gathered
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, thumbs


def at_once(count, call):
    """`call(number)` from so many threads, each started once the one before waits; results by number."""
    found = {}

    def run(number):
        try:
            found[number] = call(number)
        except BaseException as error:  # noqa: BLE001  # it is what came of it
            found[number] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [found[number] for number in range(count)]


def test_who_waits_is_done_with_whoever_has_the_turn():
    gathering, sets, begun, go = Gathering(most=100), [], threading.Event(), threading.Event()

    def work(items):
        sets.append(list(items))
        begun.set()
        assert go.wait(30)
        return [item * 10 for item in items]

    def call(number):
        if number:
            assert begun.wait(30)
            if number == 7:
                while len(gathering._waiting) < 6:
                    time.sleep(0.01)
                threading.Timer(0.2, go.set).start()
        return gathering.do(number, work)

    assert at_once(8, call) == [number * 10 for number in range(8)]
    assert sets[0] == [0]
    assert sorted(sets[1]) == list(range(1, 8))
    assert len(sets) == 2


def test_a_set_has_its_bound_and_nobody_is_forgotten():
    gathering, sizes = Gathering(most=3), []

    def work(items):
        sizes.append(len(items))
        time.sleep(0.01)
        return items

    assert at_once(20, lambda number: gathering.do(number, work)) == list(range(20))
    assert max(sizes) <= 3
    assert sum(sizes) == 20


def test_an_error_is_raised_to_all_of_its_set_and_to_nobody_else():
    gathering = Gathering(most=100)

    def work(items):
        time.sleep(0.05)
        if any(item < 0 for item in items):
            raise ValueError("negative")
        return items

    found = at_once(6, lambda number: gathering.do(number - 1 if number else -1, work))
    assert isinstance(found[0], ValueError)
    assert gathering.do(5, work) == 5
    assert not gathering._waiting


@pytest.mark.django_db(transaction=True)
def test_events_of_many_callers_are_each_answered_for(tmp_path):
    world = lane_world()
    generation = world.generate(open_store(str(tmp_path)))
    sender = Sender(world.project, f"s-{uuid.uuid4().hex[:6]}", ACTOR)
    shared = thumbs(generation.id)
    bodies = [thumbs(generation.id) for _ in range(20)]
    bodies += [shared, shared, {**shared, "value": False}, {"event_id": "x"}]
    found = at_once(
        len(bodies), lambda number: feedback_gathered(sender=sender, body=json.dumps(bodies[number]).encode())
    )
    assert {outcome.status for outcome in found[:20]} == {201}
    assert [Feedback.objects.get(id=outcome.feedback_id).value for outcome in found[:20]] == [True] * 20
    assert len({outcome.feedback_id for outcome in found[:20]}) == 20
    same = [outcome for outcome in found[20:23] if isinstance(outcome, Receipt)]
    assert len({outcome.feedback_id for outcome in same}) == 1
    assert [outcome.status for outcome in same].count(201) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in found[20:23]) == 3 - len(same)
    assert isinstance(found[23], Invalid)
    told = Event.objects.filter(project=world.project, type="feedback.received")
    assert sum(event.data.get("count", 1) for event in told) == Feedback.objects.filter(project=world.project).count()
