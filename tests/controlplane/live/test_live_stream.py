"""No subscriber misses an event, and none invents one."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from asgiref.sync import sync_to_async
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.db import connection, transaction

from controlplane.live import consumers, nudges
from controlplane.models import Event, Project
from controlplane.services import events as events_service
from controlplane.services import nudges as nudges_service
from controlplane.services.events import project_topic
from controlplane.states import MemberRole, Scope
from tests.controlplane.api.api_factories import make_key, make_project, make_user
from tests.controlplane.live.live_client import (
    Live,
    append,
    append_inside,
    communicator,
    in_database,
    key_headers,
)

pytestmark = pytest.mark.django_db(transaction=True)
SLOW_TIMER = 60.0  # a test with it relies on nudges alone


@sync_to_async
def prepare():
    project = make_project()
    return project, make_user(project, MemberRole.VIEWER), project_topic(project.pk)


@sync_to_async
def committed(topic: str) -> list[tuple[int, object]]:
    return [(event.seq, event.data.get("mark")) for event in Event.objects.filter(topic_id=topic).order_by("seq")]


class Writer:
    """A transaction of its own, held open until told."""

    def __init__(self, project: Project, mark: int, topic: str = "") -> None:
        self.appended, self.go = threading.Event(), threading.Event()
        self.keep = True
        self._thread = threading.Thread(target=self._run, args=(project, mark, topic))
        self._thread.start()

    def _run(self, project: Project, mark: int, topic: str) -> None:
        try:
            with transaction.atomic():
                append_inside(project, mark, topic)
                self.appended.set()
                assert self.go.wait(20)
                transaction.set_rollback(not self.keep)
        finally:
            connection.close()

    def end(self, *, keep: bool) -> None:
        self.keep = keep
        self.go.set()

    async def done(self) -> None:
        await asyncio.to_thread(self._thread.join, 20)
        assert not self._thread.is_alive()


async def test_two_open_transactions_and_a_rollback() -> None:
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=SLOW_TIMER)
    await live.subscribe(topic, None)

    rolled_back = Writer(project, mark=1)
    await asyncio.to_thread(rolled_back.appended.wait, 10)
    kept = Writer(project, mark=2)  # waits for the topic's counter
    await live.silence()
    assert not kept.appended.is_set()
    rolled_back.end(keep=False)
    await asyncio.to_thread(kept.appended.wait, 10)
    await live.silence()  # open still: nothing may be seen
    third = Writer(project, mark=3)
    kept.end(keep=True)
    first = await live.hear()
    await asyncio.to_thread(third.appended.wait, 10)
    third.end(keep=True)
    second = await live.hear()
    for writer in (rolled_back, kept, third):
        await writer.done()
    await live.silence()
    assert [(e["seq"], e["data"]["mark"]) for e in (first, second)] == [(3, 2), (4, 3)]
    assert await committed(topic) == [(1, None), (2, None), (3, 2), (4, 3)]
    await live.close()


async def test_commit_order_may_differ_from_id_order_and_nobody_misses_the_late_one() -> None:
    """Two topics: the first transaction has the lower ids and commits last. A reader by id would have passed it."""
    project, user, topic = await prepare()
    other = f"run:{project.pk}"
    await in_database(append)(project, 0, other)
    live = await Live.open(user, interval_s=SLOW_TIMER)
    await live.subscribe(topic, None)
    await live.subscribe(other, None)
    late, early = Writer(project, 1, topic), None
    await asyncio.to_thread(late.appended.wait, 10)
    early = Writer(project, 2, other)
    await asyncio.to_thread(early.appended.wait, 10)
    early.end(keep=True)
    first = await live.hear()
    late.end(keep=True)
    second = await live.hear()
    assert [(e["topic"], e["data"]["mark"]) for e in (first, second)] == [(other, 2), (topic, 1)]
    ids = await in_database(lambda: dict(Event.objects.values_list("data__mark", "id")))()
    assert ids[1] < ids[2]
    for writer in (late, early):
        await writer.done()
    await live.close()


async def test_many_writers_many_readers_each_sees_the_log() -> None:
    project, user, topic = await prepare()
    topics = [topic, f"run:{project.pk}", f"lane:{project.pk}"]
    for name in topics:
        await in_database(append)(project, 0, name)
    readers = [await Live.open(user, interval_s=1.0) for _ in range(3)]
    marks = iter(range(1, 10_000))

    def write(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(12):
                with transaction.atomic():
                    for name in sorted(chance.sample(topics, chance.randint(1, 2))):
                        append_inside(project, next(marks), name)
                    transaction.set_rollback(chance.random() < 0.3)
        finally:
            connection.close()

    writers = [asyncio.create_task(asyncio.to_thread(write, seed)) for seed in range(4)]
    for reader in readers:
        await asyncio.sleep(0.05)
        await reader.say(subscribe=[{"topic": name, "last_seq": 0} for name in topics])
    await asyncio.gather(*writers)
    expected = {name: await committed(name) for name in topics}
    total = sum(map(len, expected.values()))
    assert total > 30
    for reader in readers:
        heard = [e for e in await reader.events(total + len(topics)) if not e["type"].startswith("stream.")]
        seen = {name: [(e["seq"], e["data"].get("mark")) for e in heard if e["topic"] == name] for name in topics}
        assert seen == expected
        await reader.silence(0.1)
        await reader.close()


async def test_history_is_sent_page_by_page_from_last_seq(monkeypatch) -> None:
    monkeypatch.setattr(consumers, "PAGE", 3)
    project, user, topic = await prepare()
    for mark in range(8):
        await in_database(append)(project, mark)
    live = await Live.open(user, interval_s=SLOW_TIMER)
    hello = await live.subscribe(topic, 2)
    assert (hello["type"], hello["seq"]) == ("stream.subscribed", 2)
    assert [e["seq"] for e in await live.events(8)] == [3, 4, 5, 6, 7, 8, 9, 10]
    await live.silence()
    event = (await live.subscribe(topic, 9), await live.hear())[1]
    assert event["data"] == {"mark": 7, "actor": {"kind": "system", "name": "system"}, "reason": "because"}
    await live.close()


async def test_a_client_ahead_of_the_log_is_reset() -> None:
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=SLOW_TIMER)
    reset = await live.subscribe(topic, 99)
    assert (reset["type"], reset["seq"]) == ("stream.reset", 2)
    assert (await live.hear())["seq"] == 2
    await in_database(append)(project, 5)
    assert (await live.hear())["seq"] == 3
    await live.close()


async def test_lost_nudges_cost_one_interval(monkeypatch) -> None:
    monkeypatch.setattr(events_service, "topic_nudge", lambda topic, seq: None)
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=0.4)
    await live.subscribe(topic, None)
    await asyncio.sleep(0.1)
    for mark in range(3):
        await in_database(append)(project, mark)
    assert [e["data"]["mark"] for e in await live.events(3)] == [0, 1, 2]
    await live.close()


async def test_without_the_timer_a_lost_nudge_is_not_noticed(monkeypatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(events_service, "topic_nudge", lambda topic, seq: None)
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=SLOW_TIMER)
    await live.subscribe(topic, None)
    await asyncio.sleep(0.3)
    await in_database(append)(project, 1)
    await live.silence(0.8)
    await live.close()


async def test_redis_down_from_the_start(monkeypatch) -> None:
    layer = RedisPubSubChannelLayer(hosts=["redis://127.0.0.1:1"])
    monkeypatch.setattr(nudges, "get_channel_layer", lambda: layer)
    monkeypatch.setattr(nudges_service, "get_channel_layer", lambda: layer)
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=0.4)
    assert (await live.subscribe(topic, None))["type"] == "stream.subscribed"
    await in_database(append)(project, 1)
    assert (await live.hear())["data"]["mark"] == 1
    await live.close()


async def test_a_dead_channel_is_replaced(monkeypatch) -> None:
    monkeypatch.setattr(nudges, "RESTART_PAUSE_S", 0.0)
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=1.0)
    await live.subscribe(topic, None)
    await asyncio.sleep(0.3)
    monkeypatch.setattr(events_service, "topic_nudge", lambda topic, seq: None)
    await in_database(append)(project, 1)
    assert (await live.hear())["data"]["mark"] == 1  # by timer; the hub begins anew
    monkeypatch.undo()
    await asyncio.sleep(0.2)
    await in_database(append)(project, 2)
    assert (await live.hear(0.7))["data"]["mark"] == 2  # by nudge again
    await live.close()


async def test_a_bearer_key_subscribes_without_an_origin() -> None:
    project, _, topic = await prepare()
    _, token = await sync_to_async(make_key)(project, Scope.READ)
    socket = communicator(key_headers(token), interval_s=SLOW_TIMER)
    assert await socket.connect()
    live = Live(socket)
    assert (await live.subscribe(topic, 0))["type"] == "stream.subscribed"
    await live.close()
