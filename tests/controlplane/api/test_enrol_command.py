"""The command that registers an engine, over the wire: its tokens, its lease while it runs, and its end."""

import os
import signal
import stat
import subprocess
import sys
import time

import httpx
import msgspec
import pytest
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.models import Replica
from controlplane.selectors.replica_tokens import Listener, replica_token
from controlplane.services.fleet import cluster_create
from controlplane.services.forgetting import replica_forget
from controlplane.states import Scope
from rl_core.engines import enrol
from rl_core.engines.starting import CannotStartError
from rl_core.types import ClusterRole
from tests.controlplane.api.api_factories import make_key
from tests.controlplane.api.web_process import serving
from tests.domain_factories import TESTER, make_project


def command(url, project, tmp_path, *, key, run):
    (tmp_path / "key").write_text(key)
    options = {
        "control-plane": url, "project": project.slug, "cluster": "far", "name": "far-1",
        "inference-url": "http://10.1.0.7:8001", "control-url": "http://10.1.0.7:8002", "lease-s": "3",
        "key-file": str(tmp_path / "key"), "token-dir": str(tmp_path / "tokens"),
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "rl_core.engines.enrol", *words, "--", sys.executable, "-c", run]


def left():
    """Seconds that the lease has left."""
    rows = Replica.objects.annotate(left=F("lease_until") - Now())
    return max((row.left.total_seconds() for row in rows), default=None)


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_an_engine_is_there_for_as_long_as_it_runs(test_database_url, tmp_path):
    project = make_project()
    cluster_create(project=project, slug="far", role=ClusterRole.ROLLOUT, region="far", capacity=8, actor=TESTER)
    engine = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); time.sleep(60)"
    with serving(test_database_url, log=tmp_path / "web.log") as url:
        refused = subprocess.run(
            command(url, project, tmp_path, key="nonsense", run=engine), capture_output=True, text=True, timeout=60
        )
        assert (refused.returncode, Replica.objects.count()) == (2, 0)
        assert "refuses (401)" in refused.stderr

        _, key = make_key(project, Scope.REPLICA)
        process = subprocess.Popen(command(url, project, tmp_path, key=key, run=engine))
        eventually(lambda: left() is not None)
        replica = Replica.objects.get()
        first = replica.lease_until
        eventually(lambda: Replica.objects.get().lease_until > first)  # renewed
        for listener in Listener:
            path = tmp_path / "tokens" / listener.value
            assert path.read_text() == replica_token(replica.pk, listener, enrolment=1)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        time.sleep(0.5)  # the command's interpreter has to be up before it can be told anything
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 7  # its own word
        assert left() <= 0


def test_an_engine_that_was_forgotten_ends_and_registers_anew(test_database_url, tmp_path):
    project = make_project()
    cluster_create(project=project, slug="far", role=ClusterRole.ROLLOUT, region="far", capacity=8, actor=TESTER)
    engine = f"""
import pathlib, signal, time
def end(*_):
    pathlib.Path({str(tmp_path / "ended")!r}).touch()
    raise SystemExit(0)
signal.signal(15, end)
pathlib.Path({str(tmp_path / "up")!r}).touch()
time.sleep(60)
"""
    with serving(test_database_url, log=tmp_path / "web.log") as url:
        _, key = make_key(project, Scope.REPLICA)
        words = command(url, project, tmp_path, key=key, run=engine)
        process = subprocess.Popen(words)
        eventually((tmp_path / "up").exists)
        first = Replica.objects.get()
        with transaction.atomic():  # between two renewals
            Replica.objects.update(lease_until=Now(), state="offline")
            replica_forget(replica=first, actor=TESTER, reason="the line is broken")
        assert process.wait(30) == 3
        assert (tmp_path / "ended").exists()
        again = subprocess.Popen(words)
        eventually(Replica.objects.exists)
        assert Replica.objects.get().pk != first.pk
        again.terminate()
        again.wait(30)


@pytest.mark.parametrize(
    ("said", "because"), [("no such place", "refuses .404.: no such place"), ('{"code": "not_found"}', "knows no")]
)
def test_only_the_control_planes_own_word_says_that_a_replica_is_forgotten(said, because):
    wanted = enrol.Registration(project="p", cluster="c", name="n", inference_url="i", control_url="c")
    plane = enrol.ControlPlane("http://127.0.0.1:1", "key")
    plane._http = httpx.Client(
        base_url="http://proxy", transport=httpx.MockTransport(lambda _: httpx.Response(404, text=said))
    )
    with pytest.raises(CannotStartError, match=because) as raised:
        plane.renew(wanted, "r", 30)
    assert isinstance(raised.value, enrol.ForgottenError) == said.startswith("{")


class Plane:
    """A control plane that registers everybody."""

    def enrol(self, _):
        body = {"replica": {"id": "r"}, "inference_token": "i", "control_token": "c", "peer_token": "p"}
        return msgspec.convert(body, enrol._Enrolled)


def test_what_a_killed_one_left_behind_is_no_obstacle(tmp_path):
    """In a container the next one has the same process id."""
    (tmp_path / f".inference.{os.getpid()}").write_text("half a tok")
    assert enrol.register(Plane(), None, tmp_path) == "r"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "inference": "i",
        "control": "c",
        "peer": "p",
    }


def test_a_folder_that_takes_no_tokens_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStartError, match="the tokens cannot be written"):
        enrol.register(Plane(), None, tmp_path / "file")
