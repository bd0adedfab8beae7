"""A cluster's load: our gateway's counters, and what a Prometheus server answers, however badly."""

from __future__ import annotations

import ipaddress
import json
import threading
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest
from django.db.models import F

from controlplane.conductor.lending import loans_advance, policies_look
from controlplane.conductor.loads import gateway_load, prometheus_load, prometheus_number
from controlplane.errors import Unavailable
from controlplane.models import Generation, Loan, Replica, new_id
from controlplane.services.lending import replica_lend
from controlplane.states import ReplicaState
from rl_core.store import open_store
from tests.domain_factories import TESTER
from tests.lane_rows import lane_world
from tests.lending_rows import BY_LOAD, lending_world


@contextmanager
def prometheus(status: int, body: bytes, asked: list[str] | None = None):
    """A server that answers every query with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = self.rfile.read(int(self.headers["content-length"])).decode()
            if asked is not None:
                asked.extend([self.path, *parse_qs(said)["query"]])
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def near(settings):
    settings.METRICS_NETWORKS = (ipaddress.ip_network("127.0.0.0/8"),)


def vector(*values: str) -> bytes:
    result = [{"metric": {}, "value": [1700000000.1, value]} for value in values]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (vector("12.5"), 12.5),
        (vector("0"), 0.0),
        (b'{"status":"success","data":{"resultType":"scalar","result":[1700000000,"3"]}}', 3.0),
    ],
)
def test_one_number_is_read(body, load):
    assert prometheus_number(200, body) == load


def test_the_query_is_asked_over_http_and_the_answer_bounded(near):
    asked: list[str] = []
    with prometheus(200, vector("2"), asked) as url:
        assert prometheus_load(f"{url}/", "sum(rate(http_requests_total[1m]))") == 2.0
    assert asked == ["/api/v1/query", "sum(rate(http_requests_total[1m]))"]
    with prometheus(200, b" " * 100_000) as url, pytest.raises(Unavailable, match="over 65536 bytes"):
        prometheus_load(url, "up")


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, vector("1", "2"), "a vector of 2"),
        (200, vector(), "a vector of 0"),
        (200, vector("NaN"), "no number to compare"),
        (200, vector("+Inf"), "no number to compare"),
        (200, vector("many"), "not a number"),
        (200, b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "a matrix"),
        (400, b'{"status":"error","error":"parse error"}', "parse error"),
        (502, b"<html>", "does not read"),
        (200, b"\xff\xfe", "does not read"),
        (200, b'{"status":"success","data":{"resultType":"vector","result":[{"value":[1,2]}]}}', "does not read"),
    ],
)
def test_whatever_else_comes_is_no_load(status, body, says):
    with pytest.raises(Unavailable, match=says):
        prometheus_number(status, body)


def test_a_server_that_is_away_or_may_not_be_reached_is_no_load(settings):
    settings.METRICS_NETWORKS = ()
    with pytest.raises(Unavailable, match="METRICS_NETWORKS"):
        prometheus_load("http://127.0.0.1:9090", "up")
    settings.METRICS_NETWORKS = (ipaddress.ip_network("127.0.0.0/8"),)
    with pytest.raises(Unavailable, match="did not answer"):
        prometheus_load("http://127.0.0.1:1", "up")


@pytest.mark.django_db
def test_the_gateways_requests_a_second_for_each_replica_that_answers(tmp_path):
    world, other = lane_world(), lane_world()
    store = open_store(tmp_path.as_uri())
    for _ in range(6):
        world.generate(store, generation_id=new_id())
    other.generate(store, generation_id=new_id())
    assert gateway_load(world.cluster, window_s=600.0) == 6 / 600
    first = Generation.objects.filter(lane=world.lane).order_by("created_at").first()
    Generation.objects.filter(id=first.id).update(created_at=F("created_at") - timedelta(minutes=2))
    assert gateway_load(world.cluster, window_s=60.0) == 5 / 60
    Replica.objects.filter(cluster=world.cluster).update(state=ReplicaState.DRAINED)
    with pytest.raises(Unavailable, match="no replica"):
        gateway_load(world.cluster, window_s=60.0)


def tell(replica, **slots):
    """The replica says how many requests run and wait in each of its slots."""
    numbers = {name: {"running": running, "waiting": waiting} for name, (running, waiting) in slots.items()}
    summed = {key: sum(of[key] for of in numbers.values()) for key in ("running", "waiting")}
    Replica.objects.filter(pk=replica.pk).update(metrics={**summed, "slots": numbers})


@pytest.mark.django_db
def test_users_requests_under_way_count_and_rollouts_in_a_lent_slot_do_not():
    world = lending_world()
    tell(world.replica, default=(3, 2), candidate=(8, 4))
    tell(world.replicas[1], default=(1, 0), candidate=(0, 0))
    assert gateway_load(world.cluster, window_s=60.0) == 18 / 60 / 2
    replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason="the night is quiet")
    assert gateway_load(world.cluster, window_s=60.0) == 6 / 60 / 2


@pytest.mark.django_db
def test_long_answers_call_back_before_any_of_them_ends():
    world = lending_world()
    world.policy(**BY_LOAD)
    replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason="the night is quiet")
    tell(world.replica, default=(0, 0), candidate=(90, 90))
    policies_look()
    loans_advance()
    assert Loan.objects.get().state == "lent"
    tell(world.replica, default=(64, 57), candidate=(8, 0))
    policies_look()
    loans_advance()
    assert Loan.objects.get().return_reason == "its load is 6.05, above 5"
