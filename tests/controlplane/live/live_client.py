"""A client of the live stream, and writers to its topics."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from channels.routing import URLRouter
from channels.sessions import SessionMiddlewareStack
from django.conf import settings
from django.db import transaction
from django.test import Client
from django.urls import path

from controlplane.live.consumers import LiveConsumer
from controlplane.live.origin import origin_checked
from controlplane.models import Project, User
from controlplane.services.events import SYSTEM, event_append, project_topic
from controlplane.states import EventType

HOST = b"127.0.0.1:8000"


def in_database(function: Callable[..., Any]) -> Callable[..., Any]:
    return database_sync_to_async(function, thread_sensitive=False)


def session_headers(user: User) -> list[tuple[bytes, bytes]]:
    client = Client()
    client.force_login(user)
    cookie = f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"
    return [(b"cookie", cookie.encode()), (b"origin", b"http://" + HOST), (b"host", HOST)]


def key_headers(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode()), (b"host", HOST)]


class Socket(ApplicationCommunicator):
    """A websocket to an ASGI application. channels' own communicator comes only with daphne."""

    def __init__(self, application: Any, headers: list[tuple[bytes, bytes]]) -> None:
        scope = {
            "type": "websocket",
            "path": "/ws/v1/live",
            "query_string": b"",
            "headers": headers,
            "subprotocols": [],
        }
        super().__init__(application, scope)

    async def connect(self) -> bool:
        await self.send_input({"type": "websocket.connect"})
        return bool((await self.receive_output(5))["type"] == "websocket.accept")

    async def send_to(self, **frame: str | bytes) -> None:
        await self.send_input({"type": "websocket.receive", **frame})

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(5)


def communicator(headers: list[tuple[bytes, bytes]], **options: float) -> Socket:
    consumer = LiveConsumer.as_asgi(**options)
    application = origin_checked(SessionMiddlewareStack(URLRouter([path("ws/v1/live", consumer)])))
    return Socket(application, headers)


class Live:
    """A connected client."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    @classmethod
    async def open(cls, user: User, **options: float) -> Live:
        headers = await sync_to_async(session_headers)(user)
        socket = communicator(headers, **options)
        assert await socket.connect()
        return cls(socket)

    async def say(self, **message: Any) -> None:
        await self.socket.send_to(text=json.dumps({"v": 1, **message}))

    async def subscribe(self, topic: str, last_seq: int | None = 0) -> dict[str, Any]:
        await self.say(subscribe=[{"topic": topic, "last_seq": last_seq}])
        return await self.hear()

    async def hear(self, timeout: float = 5) -> dict[str, Any]:
        message = await self.socket.receive_output(timeout)
        assert message["type"] == "websocket.send", message
        envelope: dict[str, Any] = json.loads(message["text"])
        assert set(envelope) == {"v", "topic", "seq", "type", "ts", "data"}
        return envelope

    async def events(self, count: int, timeout: float = 10) -> list[dict[str, Any]]:
        return [await self.hear(timeout) for _ in range(count)]

    async def silence(self, seconds: float = 0.3) -> None:
        assert await self.socket.receive_nothing(seconds)

    async def closed(self, timeout: float = 5) -> int:
        while True:
            message = await self.socket.receive_output(timeout)
            if message["type"] == "websocket.close":
                return int(message["code"])

    async def close(self) -> None:
        await self.socket.disconnect()


def append(project: Project, mark: int, topic: str = "") -> int:
    """One committed event; its seq."""
    with transaction.atomic():
        return append_inside(project, mark, topic)


def append_inside(project: Project, mark: int, topic: str = "") -> int:
    return event_append(
        project_id=project.pk,
        topic=topic or project_topic(project.pk),
        event_type=EventType.RUN_CHANGED,
        actor=SYSTEM,
        reason="because",
        data={"mark": mark},
    )
