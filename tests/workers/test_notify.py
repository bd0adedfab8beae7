"""Alerts on their way to hooks: signed, bounded, never led elsewhere, tried again, to a real server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from controlplane.api.serializers.alerts import HookSerializer
from controlplane.errors import Invalid
from controlplane.models import AlertDelivery, AlertHook, Event, WorkUnit
from controlplane.services.alerts import alert_raise
from controlplane.services.destinations import destination_check, destination_resolve
from controlplane.services.hooks import hook_create, hook_disable
from controlplane.states import AlertKind, WorkKind, WorkState
from rl_core import destinations
from tests.lane_rows import ACTOR
from tests.shipping_rig import shipping_world
from tests.simulated_workers import due
from workers import notify
from workers.base import work_on

pytestmark = pytest.mark.django_db(transaction=True)


class Receiver(ThreadingHTTPServer):
    """Somebody's alert manager: keeps what it got, and answers as told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.slow_s = 0.0
        self.location = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/alerts"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
        time.sleep(self.server.slow_s)
        self.send_response(self.server.answers.pop(0) if self.server.answers else 204)
        if self.server.location:
            self.send_header("location", self.server.location)
        self.end_headers()

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture
def loopback(settings):
    settings.ALERT_HOOK_NETWORKS = [ip_network("127.0.0.0/8")]


def raise_one(world: Any, subject: str = "refusal") -> AlertDelivery:
    alert = alert_raise(lane=world.lane, kind=AlertKind.BEHAVIOUR, subject=subject, detail={"reason": "it rose"})
    assert alert is not None
    return AlertDelivery.objects.get(alert=alert)


def deliver(delivery: AlertDelivery) -> WorkUnit:
    unit = WorkUnit.objects.get(kind=WorkKind.NOTIFY, ref=delivery.pk)
    due(unit)
    work_on(unit.pk, notify.notify)
    unit.refresh_from_db()
    delivery.refresh_from_db()
    return unit


def test_an_alert_arrives_signed_as_standard_webhooks_says(receiver, loopback):
    world = shipping_world()
    hook, secret = hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    assert secret not in hook.sealed_secret
    delivery = raise_one(world)
    unit = deliver(delivery)
    assert (unit.state, delivery.status) == (WorkState.DONE, 204)
    assert delivery.delivered_at is not None
    headers, body = receiver.got[0]
    message = Webhook(secret).verify(body, headers)
    assert (message["type"], message["data"]["subject"], message["data"]["lane"]) == (
        "alert.behaviour", "refusal", world.lane.slug,
    )  # fmt: skip
    assert headers["webhook-id"] == str(delivery.pk)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body + b" ", headers)


def test_a_hook_that_fails_gets_it_again_under_the_same_id(receiver, loopback):
    world = shipping_world()
    hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    receiver.answers = [500, 429, 200]
    delivery = raise_one(world)
    for status, state in ((500, WorkState.QUEUED), (429, WorkState.QUEUED), (200, WorkState.DONE)):
        unit = deliver(delivery)
        assert (delivery.status, unit.state) == (status, state)
    assert unit.attempts.count() == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert unit.attempts.order_by("number").first().error_code == "hook_refused"


def test_one_that_never_takes_it_becomes_a_dead_letter(receiver, loopback):
    world = shipping_world()
    hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    receiver.answers = [500] * 20
    delivery = raise_one(world)
    for _ in range(10):
        unit = deliver(delivery)
    assert unit.state == WorkState.DEAD
    assert len(receiver.got) == 10


def test_the_address_of_a_hook_reaches_neither_events_nor_attempts_nor_readers(receiver, loopback):
    world = shipping_world()
    secret_part = "services/T0000/B0000/a-secret-part"
    hook, _ = hook_create(project=world.project, url=f"{receiver.url}/{secret_part}", actor=ACTOR)
    receiver.answers = [500]
    delivery = raise_one(world)
    deliver(delivery)
    AlertHook.objects.update(url=f"http://127.0.0.1:1/{secret_part}")
    unit = deliver(delivery)
    hook_disable(hook=hook, actor=ACTOR, reason="enough")
    told = [str(row) for row in Event.objects.values_list("data", flat=True)]
    told += [
        unit.error,
        *unit.attempts.values_list("error", flat=True),
        *unit.attempts.values_list("traceback", flat=True),
    ]
    told += [str(HookSerializer(hook).data), str(hook)]
    assert any("127.0.0.1" in text for text in told)
    assert not [text for text in told if "T0000" in text or "secret-part" in text]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example/services/T1/B1/abcdefgh", "https://hooks.example/…efgh"),
        ("https://hooks.example/x", "https://hooks.example/…"),
        ("https://hooks.example", "https://hooks.example/"),
        ("https://hooks.example?key=abcdefghijklm", "https://hooks.example/…jklm"),
    ],
)
def test_of_an_address_its_host_and_an_end_are_shown(url, shown):
    assert AlertHook(url=url).shown == shown


def test_a_redirect_is_not_followed(receiver, loopback):
    world = shipping_world()
    hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    receiver.answers, receiver.location = [302], receiver.url + "/elsewhere"
    delivery = raise_one(world)
    assert deliver(delivery).state == WorkState.QUEUED
    assert (delivery.status, len(receiver.got)) == (302, 1)


def test_a_hook_that_answers_410_is_disabled(receiver, loopback):
    world = shipping_world()
    hook, _ = hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    receiver.answers = [410]
    assert deliver(raise_one(world)).state == WorkState.DONE
    hook.refresh_from_db()
    assert hook.disabled_at is not None
    assert alert_raise(lane=world.lane, kind=AlertKind.BEHAVIOUR, subject="more", detail={}) is not None
    assert AlertDelivery.objects.filter(hook=hook).count() == 1


def test_one_that_takes_too_long_or_is_not_there_is_a_failure(receiver, loopback, monkeypatch):
    monkeypatch.setattr(notify, "TOTAL_S", 0.3)
    world = shipping_world()
    hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    receiver.slow_s = 1.0
    unit = deliver(raise_one(world))
    assert unit.state == WorkState.QUEUED
    assert "did not answer" in unit.error
    AlertHook.objects.update(url="http://127.0.0.1:1/nobody")
    assert deliver(raise_one(world, "length")).state == WorkState.QUEUED


FORBIDDEN = [
    "http://hooks.example/x",
    "http://127.0.0.1/x",
    "https://127.0.0.1/x",
    "https://localhost.localdomain:99999/x",
    "https://10.0.0.8/x",
    "https://169.254.169.254/latest/meta-data",
    "https://[::1]/x",
    "https://[::ffff:127.0.0.1]/x",
    "https://[fd00::1]/x",
    "https://[64:ff9b::7f00:1]/x",
    "https://[2002:7f00:1::]/x",
    "https://0.0.0.0/x",
    "https://user:secret@hooks.example/x",
    "https://hooks.example/x#part",
    "https:///x",
    "https://hooks.example/a b",
    "ftp://hooks.example/x",
    "file:///etc/passwd",
    "https://hööks.example/x",
    "//hooks.example",
    "",
]


@pytest.mark.parametrize("url", FORBIDDEN)
def test_where_no_alert_may_go(url, settings):
    settings.ALERT_HOOK_NETWORKS = []
    with pytest.raises(Invalid):
        destination_check(url)


def test_a_name_is_checked_by_every_address_that_it_has_and_the_checked_one_is_used(monkeypatch, settings):
    settings.ALERT_HOOK_NETWORKS = []
    found = [["93.184.216.34"], ["93.184.216.34", "10.0.0.8"], ["::1"], []]

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in found.pop(0)]

    monkeypatch.setattr(destinations.socket, "getaddrinfo", resolve)
    good = destination_resolve("https://hooks.example/x?y=1")
    assert (good.url, good.host, good.netloc) == (
        "https://93.184.216.34:443/x?y=1", "hooks.example", "hooks.example",
    )  # fmt: skip
    for _ in range(3):
        with pytest.raises(Invalid):
            destination_resolve("https://hooks.example/x")


def test_what_was_stored_before_the_setting_was_taken_back_is_not_sent(receiver, settings):
    settings.ALERT_HOOK_NETWORKS = [ip_network("127.0.0.0/8")]
    world = shipping_world()
    hook_create(project=world.project, url=receiver.url, actor=ACTOR)
    delivery = raise_one(world)
    settings.ALERT_HOOK_NETWORKS = []
    assert deliver(delivery).state == WorkState.DEAD
    assert receiver.got == []


def test_a_network_of_the_setting_is_reachable_without_tls_by_address_alone(settings):
    settings.ALERT_HOOK_NETWORKS = [ip_network("10.0.0.0/8")]
    assert destination_check("http://10.1.2.3:9093/hook") == ("10.1.2.3", 9093)
    with pytest.raises(Invalid):
        destination_check("http://alertmanager.internal/hook")
