"""One row that cannot be looked at does not keep the conductor from the others."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from django.db import OperationalError
from psycopg.errors import DeadlockDetected

from controlplane.conductor import shipping
from controlplane.conductor.duties import advance_runs
from controlplane.conductor.fleet import fleet_poll
from controlplane.conductor.looks import Looks
from controlplane.errors import Conflict
from controlplane.models import Lane, MetricPoint, Replica, ReplicaSlot, Run
from controlplane.services.metrics import Metric
from controlplane.states import ReplicaState, RunState
from tests.domain_factories import make_cluster, make_project, make_run
from tests.lane_rows import lane_world

WELL = {"/control/version": {"name": "r", "slots": {}}, "/control/metrics": {"busy_s_total": 1.0, "running": 0}}


def fails(error: Exception) -> None:
    raise error


def test_a_bug_is_met_once_in_a_while():
    looks, seen = Looks("row", pause_s=60.0), []
    for _ in range(3):
        assert not looks.at("bad", lambda: (seen.append("bad"), fails(KeyError("a bug"))))
        assert looks.at("good", lambda: seen.append("good"))
    assert seen == ["bad", "good", "good", "good"]
    assert not Looks("row", pause_s=0.0).at("bad", lambda: fails(KeyError("a bug")))


def test_what_moved_meanwhile_is_looked_at_again_at_once():
    looks = Looks("row", pause_s=60.0)
    assert not looks.at("row", lambda: fails(Conflict("it moved")))
    assert looks.at("row", lambda: None)


def test_a_database_that_is_away_ends_the_round():
    with pytest.raises(OperationalError):
        Looks("row").at("row", lambda: fails(OperationalError("away")))


def test_who_lost_to_another_transaction_is_looked_at_again_at_once():
    looks = Looks("row", pause_s=60.0)
    deadlock = OperationalError("deadlock detected")
    deadlock.__cause__ = DeadlockDetected()
    assert not looks.at("row", lambda: fails(deadlock))
    assert looks.at("row", lambda: None)


@pytest.mark.django_db
def test_a_run_that_cannot_be_read_does_not_stop_those_after_it():
    bad, good = make_run(), make_run()
    Run.objects.filter(pk=bad.pk).update(spec={"of": "another release"})
    advance_runs()
    good.refresh_from_db()
    assert good.state == RunState.RUNNING


@contextmanager
def listener(answers: dict[str, object]):
    """A control listener that says these things."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers[self.path.split("?")[0]]
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.django_db
@pytest.mark.parametrize("nonsense", [b"<html>a proxy's page</html>", b"\xff", [1], {"busy_s_total": "many"}])
def test_a_replica_that_talks_nonsense_does_not_hide_the_others(nonsense, settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    make_cluster(make_project(), replicas=2)
    mad, well = Replica.objects.order_by("name")
    before = {"polled_at": 1.0, "busy_s_total": 0.0, "generated_tokens_total": 0}
    Replica.objects.update(state=ReplicaState.OFFLINE, metrics=before)
    with listener({**WELL, "/control/metrics": nonsense}) as one, listener(WELL) as other:
        for replica, url in ((mad, one), (well, other)):
            (tmp_path / f"{replica.pk}.control").write_text("token")
            Replica.objects.filter(pk=replica.pk).update(control_url=url)
        fleet_poll()
    well.refresh_from_db()
    assert (well.state, well.metrics["busy_s_total"]) == (ReplicaState.READY, 1.0)


@pytest.mark.django_db
@pytest.mark.parametrize(("state", "written"), [(RunState.RUNNING, True), (RunState.PAUSED, False)])
def test_series_over_time_are_written_while_a_run_runs(state, written, settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    run = make_run()
    advance_runs()
    Run.objects.filter(pk=run.pk).update(state=state)
    replica = ReplicaSlot.objects.filter(desired_version__lineage=run.lineage).first().replica
    before = {"polled_at": 1.0, "busy_s_total": 0.0, "generated_tokens_total": 0}
    with listener({**WELL, "/control/metrics": {"busy_s_total": 1.0, "generated_tokens_total": 5}}) as url:
        (tmp_path / f"{replica.pk}.control").write_text("token")
        Replica.objects.filter(pk=replica.pk).update(control_url=url, metrics=before)
        fleet_poll()
    assert MetricPoint.objects.filter(run=run, name=Metric.ENGINE_IDLE).exists() is written


@pytest.mark.django_db
def test_a_bug_at_one_lane_does_not_keep_the_next_from_its_slot(monkeypatch):
    lanes = {lane_world().lane.pk, lane_world().lane.pk}
    Lane.objects.filter(pk__in=lanes).update(cadence={"interval_s": 60.0})
    seen = set()

    def broken(*, lane):
        seen.add(lane.pk)
        raise KeyError("a bug")

    monkeypatch.setattr(shipping, "slots_advance", broken)
    shipping.advance_lanes()
    assert seen == lanes


@pytest.mark.django_db
@pytest.mark.parametrize("url", ["http://gpu..example:1", "http://a\u20ac\u2028:1", "no url"])
def test_an_address_that_is_none_keeps_nobody_else_from_being_looked_at(url, settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    make_cluster(make_project(), replicas=2)
    lost, well = Replica.objects.order_by("name")
    Replica.objects.update(state=ReplicaState.OFFLINE)
    Replica.objects.filter(pk=lost.pk).update(state=ReplicaState.READY)
    with listener(WELL) as other:
        for replica, place in ((lost, url), (well, other)):
            (tmp_path / f"{replica.pk}.control").write_text("token")
            Replica.objects.filter(pk=replica.pk).update(control_url=place)
        fleet_poll()
    states = dict(Replica.objects.values_list("pk", "state"))
    assert states == {lost.pk: ReplicaState.OFFLINE, well.pk: ReplicaState.READY}


@pytest.mark.django_db
def test_only_the_numbers_of_an_engines_metrics_are_kept(settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    make_cluster(make_project(), replicas=1)
    replica = Replica.objects.get()
    (tmp_path / f"{replica.pk}.control").write_text("token")
    said = {
        "running": 0,
        "name": "x" * 9,
        "huge": 10**30,
        "a\x00b": 1,
        "slots": {"default": {"waiting": 2, "of": []}, "x": 1},
    }
    with listener({**WELL, "/control/metrics": said}) as url:
        Replica.objects.filter(pk=replica.pk).update(control_url=url)
        fleet_poll()
    replica.refresh_from_db()
    kept = {key: value for key, value in replica.metrics.items() if key != "polled_at"}
    assert kept == {"running": 0, "a\ufffdb": 1, "slots": {"default": {"waiting": 2}}}
