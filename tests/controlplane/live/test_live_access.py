"""Who may listen, for how long, and what happens to clients that misbehave."""

from __future__ import annotations

import asyncio
import json

import pytest
from asgiref.sync import sync_to_async
from django.contrib.sessions.models import Session
from django.utils import timezone

from controlplane.live.consumers import MAX_BAD_MESSAGES, MAX_TOPICS, Close, LiveConsumer
from controlplane.models import ApiKey, Membership, User
from controlplane.services.events import project_topic
from controlplane.states import MemberRole, Scope
from tests.controlplane.api.api_factories import make_key, make_project, make_user
from tests.controlplane.live.live_client import (
    HOST,
    Live,
    append,
    communicator,
    in_database,
    key_headers,
    session_headers,
)

pytestmark = pytest.mark.django_db(transaction=True)


@sync_to_async
def prepare():
    project = make_project()
    return project, make_user(project, MemberRole.VIEWER), project_topic(project.pk)


@pytest.mark.parametrize("headers", [[(b"origin", b"http://" + HOST), (b"host", HOST)], key_headers("slw_a_b")])
async def test_nobody_is_closed_with_a_code_that_says_so(headers) -> None:
    socket = communicator(headers)
    assert await socket.connect()
    assert await Live(socket).closed() == Close.UNAUTHENTICATED


@pytest.mark.parametrize("origin", [b"http://evil.example", b"http://127.0.0.1:9999", b"http://[", b"null", b"", None])
async def test_pages_of_other_origins_are_refused(origin: bytes | None) -> None:
    _, user, _ = await prepare()
    headers = [h for h in await sync_to_async(session_headers)(user) if h[0] != b"origin"]
    if origin is not None:
        headers.append((b"origin", origin))
    assert not await communicator(headers).connect()


async def test_topics_of_other_projects_and_unknown_ones_are_not_found() -> None:
    _, user, _ = await prepare()
    _, _, foreign = await prepare()
    live = await Live.open(user)
    for topic in (foreign, "run:nothing", "🐟"):
        answer = await live.subscribe(topic)
        assert (answer["type"], answer["topic"], answer["data"]["code"]) == ("stream.error", topic, "not_found")
    await live.close()


async def test_a_key_without_reading_scope_may_not_listen() -> None:
    project, _, topic = await prepare()
    _, token = await sync_to_async(make_key)(project, Scope.FEEDBACK)
    socket = communicator(key_headers(token))
    assert await socket.connect()
    assert (await Live(socket).subscribe(topic))["data"]["code"] == "not_found"
    await socket.disconnect()


async def test_a_revoked_membership_ends_the_subscription_before_the_next_event() -> None:
    project, user, topic = await prepare()
    live = await Live.open(user, interval_s=60.0)
    await live.subscribe(topic, None)
    await asyncio.sleep(0.2)
    await in_database(Membership.objects.filter(user=user).delete)()
    await in_database(append)(project, 1)
    answer = await live.hear()
    assert (answer["type"], answer["data"]["code"]) == ("stream.error", "not_found")
    await in_database(append)(project, 2)
    await live.silence()
    await live.close()


async def _log_out(user: User, key: ApiKey) -> None:
    await Session.objects.all().adelete()


async def _expire(user: User, key: ApiKey) -> None:
    await Session.objects.all().aupdate(expire_date=timezone.now())


async def _disable(user: User, key: ApiKey) -> None:
    await User.objects.filter(pk=user.pk).aupdate(is_active=False)


async def _change_password(user: User, key: ApiKey) -> None:
    await User.objects.filter(pk=user.pk).aupdate(password="another")


@pytest.mark.parametrize("end", [_log_out, _expire, _disable, _change_password])
async def test_a_session_that_ends_closes_the_stream(end) -> None:
    _, user, topic = await prepare()
    live = await Live.open(user, interval_s=0.3)
    await live.subscribe(topic, None)
    await live.silence(0.5)
    await end(user, None)
    assert await live.closed() == Close.UNAUTHENTICATED


@pytest.mark.parametrize("change", [{"revoked_at": timezone.now()}, {"expires_at": timezone.now()}])
async def test_a_key_that_ends_closes_the_stream(change) -> None:
    project, _, topic = await prepare()
    key, token = await sync_to_async(make_key)(project, Scope.READ)
    socket = communicator(key_headers(token), interval_s=0.3)
    await socket.connect()
    live = Live(socket)
    await live.subscribe(topic, None)
    await ApiKey.objects.filter(pk=key.pk).aupdate(**change)
    assert await live.closed() == Close.UNAUTHENTICATED


BAD = [
    "{",
    "[]",
    '"x"',
    '{"v":1}',
    '{"v":2,"subscribe":[{"topic":"a"}]}',
    '{"v":1,"subscribe":[{"topic":"a","last_seq":-1}]}',
    '{"v":1,"subscribe":[{"topic":"a","last_seq":1e99}]}',
    '{"v":1,"subscribe":[{"topic":"a","last_seq":99999999999999999999999}]}',
    '{"v":1,"subscribe":[{"topic":""}]}',
    '{"v":1,"subscribe":[{"topic":"a\\u0000"}]}',
    '{"v":1,"subscribe":[{"topic":"\\ud800"}]}',
    '{"v":1,"subscribe":[{"topic":"a","colour":1}]}',
    '{"v":1,"subscribe":[{"topic":"' + "x" * 81 + '"}]}',
    "[" * 10_000,
    "x" * 20_000,
]


@pytest.mark.parametrize("text", BAD)
async def test_bad_messages_are_answered_and_the_stream_goes_on(text: str) -> None:
    _, user, topic = await prepare()
    live = await Live.open(user)
    await live.socket.send_to(text=text)
    answer = await live.hear()
    assert (answer["type"], answer["data"]["code"]) == ("stream.error", "bad_message")
    assert (await live.subscribe(topic))["type"] == "stream.subscribed"
    await live.close()


async def test_repeated_bad_messages_close_the_stream() -> None:
    _, user, _ = await prepare()
    live = await Live.open(user)
    for _ in range(MAX_BAD_MESSAGES):
        await live.socket.send_to(bytes=b"\x00")
    assert await live.closed() == Close.POLICY


async def test_topics_are_limited() -> None:
    project, user, topic = await prepare()
    live = await Live.open(user)
    names = [f"run:{index}" for index in range(MAX_TOPICS)]
    for name in names:
        await in_database(append)(project, 0, name)
    for start in range(0, MAX_TOPICS, 16):
        await live.say(subscribe=[{"topic": name, "last_seq": None} for name in names[start : start + 16]])
    answers = await live.events(MAX_TOPICS)
    assert {answer["type"] for answer in answers} == {"stream.subscribed"}
    assert (await live.subscribe(topic))["data"]["code"] == "bad_message"
    await live.say(unsubscribe=[names[0]])
    assert (await live.hear())["type"] == "stream.unsubscribed"
    assert (await live.subscribe(topic))["type"] == "stream.subscribed"
    await live.close()


async def test_a_client_that_does_not_read_is_dropped() -> None:
    project, user, topic = await prepare()
    for mark in range(3):
        await in_database(append)(project, mark)
    consumer = LiveConsumer(interval_s=60.0, send_timeout_s=0.3)
    closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    incoming: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    stuck = False

    async def send(message: dict[str, object]) -> None:
        nonlocal stuck
        if message["type"] == "websocket.close":
            closed.set_result(message["code"])
        elif message["type"] == "websocket.send":
            if stuck:
                await asyncio.Event().wait()  # the peer's window is full
            stuck = True

    from django.contrib.sessions.backends.db import SessionStore

    headers = dict(await sync_to_async(session_headers)(user))
    key = headers[b"cookie"].decode().split("=")[1]
    scope = {"type": "websocket", "headers": [], "session": SessionStore(key)}
    task = asyncio.create_task(consumer(scope, incoming.get, send))
    await incoming.put({"type": "websocket.connect"})
    message = {"v": 1, "subscribe": [{"topic": topic, "last_seq": 0}]}
    await incoming.put({"type": "websocket.receive", "text": json.dumps(message)})
    assert await asyncio.wait_for(closed, 5) == Close.TRY_LATER
    await incoming.put({"type": "websocket.disconnect", "code": 1006})
    await asyncio.wait_for(task, 5)
