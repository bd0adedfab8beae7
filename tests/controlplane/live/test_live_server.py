"""The stream through a real server and a real client, over HTTP and websocket beside each other."""

from __future__ import annotations

import json
import struct
import time
import uuid
from socket import SO_LINGER, SOL_SOCKET, create_connection

import httpx
import pytest
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.conf import settings
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from controlplane.services import nudges as nudges_service
from controlplane.services.events import project_topic
from controlplane.states import Scope
from tests.controlplane.api.api_factories import make_key, make_project
from tests.controlplane.api.web_process import serving
from tests.controlplane.live.live_client import append

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


def test_a_client_reconnects_and_has_missed_nothing(test_database_url: str, tmp_path, monkeypatch) -> None:
    # The server is a process of its own, with the prefix of the settings and not with the tests'.
    layer = RedisPubSubChannelLayer(hosts=[settings.REDIS_URL], prefix="slipway")
    monkeypatch.setattr(nudges_service, "get_channel_layer", lambda: layer)
    project = make_project()
    topic = project_topic(project.pk)
    _, token = make_key(project, Scope.READ)
    header = {"Authorization": f"Bearer {token}"}
    seen: list[int] = []
    with serving(test_database_url, log=tmp_path / "web.log") as url:
        address = url.replace("http", "ws") + "/ws/v1/live"

        def listen(count: int) -> None:
            """Listen from where one left off; leave without a word."""
            with connect(address, additional_headers=header) as socket:
                after = seen[-1] if seen else 0
                socket.send(json.dumps({"v": 1, "subscribe": [{"topic": topic, "last_seq": after}]}))
                while count:
                    envelope = json.loads(socket.recv(timeout=20))
                    if not envelope["type"].startswith("stream."):
                        seen.append(envelope["seq"])
                        count -= 1

        listen(2)  # the project's and the key's creation
        for mark in range(3):
            append(project, mark)  # while nobody listens
        listen(2)
        listen(1)
        with connect(address, additional_headers=header) as socket:
            socket.send(json.dumps({"v": 1, "subscribe": [{"topic": topic}]}))
            assert json.loads(socket.recv(timeout=20))["type"] == "stream.subscribed"
            time.sleep(0.5)  # until the hub listens: nudges, not the timer, are meant here
            begun = time.monotonic()
            append(project, 9)
            seen.append(json.loads(socket.recv(timeout=20))["seq"])
            assert time.monotonic() - begun < 5
        page = httpx.get(f"{url}/api/v1/events", params={"topic": topic}, headers=header).json()
        assert seen == [event["seq"] for event in page["results"]] == [1, 2, 3, 4, 5, 6]
        with pytest.raises(InvalidStatus), connect(address, origin="http://evil.example"):  # type: ignore[arg-type]
            pass
        with connect(address, additional_headers={"Authorization": "Bearer slw_a_b"}) as socket:
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4401
        host, port = url.removeprefix("http://").split(":")
        with create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /api/v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_clients_that_leave_in_the_middle_leave_no_traceback(test_database_url: str, tmp_path) -> None:
    project = make_project()
    topic = project_topic(project.pk)
    _, token = make_key(project, Scope.READ)
    log = tmp_path / "web.log"
    # Many reads: the server is at the later ones when the client is gone, and cannot hear of it before their end.
    topics = [topic, *(f"run:{uuid.uuid4()}" for _ in range(60))]
    message = json.dumps({"v": 1, "subscribe": [{"topic": name, "last_seq": 0} for name in topics]})
    with serving(test_database_url, log=log) as url:
        address = url.replace("http", "ws") + "/ws/v1/live"
        header = {"Authorization": f"Bearer {token}"}
        for mark in range(10):
            with connect(address, additional_headers=header) as socket:
                socket.send(message)
                assert json.loads(socket.recv(timeout=20))["type"] == "stream.subscribed"
                # Without a word: the server is told by a reset.
                socket.socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                socket.socket.close()
            append(project, mark)
        with connect(address, additional_headers=header) as socket:  # the server is well
            socket.send(json.dumps({"v": 1, "subscribe": [{"topic": topic}]}))
            assert json.loads(socket.recv(timeout=20))["type"] == "stream.subscribed"
        time.sleep(11)  # past the timer: a connection's task that was forgotten would send now
    assert "Traceback" not in log.read_text()
