"""What replicas are told of a version that is being published, over real connections, and that nothing waits for it."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from controlplane.models import Replica, ReplicaSlot
from controlplane.states import DesiredSource
from rl_core.types import VersionRef
from tests.domain_factories import make_run
from workers.announcing import announcing

pytestmark = pytest.mark.django_db(transaction=True)

VERSION = VersionRef("line", 0, 3)
SEGMENTS = [
    {
        "stands": {
            "segment": [f"lineages/line/0-3/9/segments/{n:04}", 10 + n, f"{n:064x}"],
            "frames": [{"segment": n, "offset": 0, "ranges": [[n, 0, 5]]}],
            "draft": ["ab" * 32, "frames/3", "cd" * 32],
        }
    }
    for n in range(3)
]


@contextmanager
def listener(status=202):
    """A control listener that takes announcements down: its URL, and what came."""
    came = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            came.append((self.path, self.headers["Authorization"], body))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def run(tmp_path, settings):
    settings.REPLICA_TOKEN_DIR = tmp_path
    return make_run()


def follow(run, slug, url, settings):
    replica = Replica.objects.get(cluster__slug=slug)
    Replica.objects.filter(pk=replica.pk).update(control_url=url)
    (settings.REPLICA_TOKEN_DIR / f"{replica.pk}.control").write_text(f"secret of {slug}")
    slots = ReplicaSlot.objects.filter(replica=replica)
    slots.update(desired_version=run.lineage.head, desired_source=DesiredSource.TRAINING_HEAD)


def publish(announcer, *, segments=SEGMENTS):
    announcer.begins(VERSION, fence=9)
    for told in [{"phase": "train"}, {"phase": "publish"}, *segments]:
        announcer.progress(told)


def test_every_follower_is_told_of_every_segment(run, settings):
    with listener() as (east, told_east), listener() as (west, told_west):
        follow(run, "east", east, settings)
        follow(run, "west", west, settings)
        with announcing(run) as announcer:
            publish(announcer)
    for told, slug in ((told_east, "east"), (told_west, "west")):
        assert {(path, token) for path, token, _ in told} == {("/control/segments", f"Bearer secret of {slug}")}
        bodies = [body for *_, body in told]
        assert [body["segments"] for body in bodies] == [[one["stands"]] for one in SEGMENTS]
        assert [body["slots"] for body in bodies] == [["default"]] * len(SEGMENTS)
        assert {(body["version"], body["fence"], body["withdrawn"]) for body in bodies} == {("line:0-3", 9, False)}


def test_a_step_that_comes_to_nothing_withdraws_last(run, settings):
    with listener() as (url, told):
        follow(run, "east", url, settings)
        with pytest.raises(KeyError):
            lose(run)
    *before, last = [body["withdrawn"] for *_, body in told]
    assert (before, last) == ([False] * len(before), True)


def lose(run):
    with announcing(run) as announcer:
        publish(announcer)
        raise KeyError("the trainer")


def test_who_does_not_take_announcements_is_left_alone_and_holds_nobody_up(run, settings):
    with listener(400) as (refuses, asked), listener() as (url, told):
        follow(run, "east", refuses, settings)
        follow(run, "west", url, settings)
        with announcing(run) as announcer:
            publish(announcer, segments=SEGMENTS[:1])
            for one in announcer._told:
                one.queue.submit(lambda: None).result()
            publish(announcer, segments=SEGMENTS[1:] * 20)
        assert len(told) == 41
        assert len(asked) <= 8  # as many as were under way at once
    follow(run, "east", "http://127.0.0.1:9", settings)
    follow(run, "west", "http://127.0.0.1:9", settings)
    with announcing(run) as announcer:
        publish(announcer)


def test_a_token_on_another_machine_costs_the_announcements_alone(run, settings):
    with listener() as (url, told):
        follow(run, "east", url, settings)
        replica = Replica.objects.get(cluster__slug="east")
        (settings.REPLICA_TOKEN_DIR / f"{replica.pk}.control").unlink()
        follow(run, "west", url, settings)
        with announcing(run) as announcer:
            publish(announcer, segments=SEGMENTS[:1])
    assert [token for _, token, _ in told] == ["Bearer secret of west"]
