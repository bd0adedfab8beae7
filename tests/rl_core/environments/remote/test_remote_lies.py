"""A remote that hangs, lies, or answers garbage or too much: an error that says whose fault it is, and soon."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_core import signing
from rl_core.destinations import Answer
from rl_core.environments.remote.client import RemoteClient, RemotePlace, _retry_after_s
from rl_core.environments.remote.messages import Called, Described, Result, SessionTold
from rl_core.environments.remote.protocol import MAX_ANSWER_BYTES, Ask
from rl_core.errors import (
    RemoteBusy,
    RemoteDiverged,
    RemoteEnded,
    RemoteFailed,
    RemoteProtocolError,
    RemoteUnreachable,
    WorldError,
)
from tests.rl_core.environments.remote.customers import OTHER_SECRET, SECRET

GOOD = {"version": 1, "kind": "environment", "example": {}}


@contextlib.contextmanager
def answering(body: bytes, *, status: int = 200, secret: str | None = SECRET, headers=None, id_of=lambda told: told):
    """A server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            asked = id_of(self.headers["webhook-id"])
            told = (signing.sign(secret, body, message_id=asked) if secret else {}) | (headers or {})
            for name, value in told.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield RemoteClient(
            RemotePlace(f"http://127.0.0.1:{server.server_address[1]}/", SECRET), answer_s=1.0, patience_s=0.2
        )
    finally:
        server.shutdown()
        server.server_close()


def error(code: str, **more) -> bytes:
    return json.dumps({"version": 1, "error": {"code": code, "message": "m", **more}}).encode()


async def test_a_good_answer_is_read():
    with answering(json.dumps(GOOD).encode()) as client:
        assert (await client.describe()).kind == "environment"


LIES = {
    "another version": ({**GOOD, "version": 2}, "version 2"),
    "no version": ({"kind": "environment"}, "version None"),
    "no object": ([1], "version None"),
    "another kind": ({**GOOD, "kind": "oracle"}, "does not allow"),
    "a world without tools": ({**GOOD, "kind": "world"}, "does not allow"),
    "tools twice": ({**GOOD, "kind": "world", "tools": [{"name": "a"}, {"name": "a"}]}, "does not allow"),
    "a NUL, which no database stores": ({**GOOD, "system": "a\0b"}, "NUL"),
    "a NUL in a schema": (
        {**GOOD, "kind": "world", "tools": [{"name": "a", "parameters": {"title": "a\0b"}}]},
        "NUL",
    ),
    "a tool with a strange name": ({**GOOD, "kind": "world", "tools": [{"name": "a b"}]}, "does not allow"),
}


@pytest.mark.parametrize(("told", "match"), LIES.values(), ids=LIES)
async def test_a_lie_is_the_environments_fault(told, match):
    with answering(json.dumps(told).encode()) as client:
        with pytest.raises(RemoteProtocolError, match=match) as caught:
            await client.describe()
        assert not isinstance(caught.value, WorldError)


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b"[" * 5000])
async def test_garbage_is_the_environments_fault(body):
    with answering(body) as client, pytest.raises(RemoteProtocolError, match="no JSON"):
        await client.describe()


@pytest.mark.parametrize("secret", [None, OTHER_SECRET])
async def test_an_answer_must_be_signed_by_the_secret(secret):
    with (
        answering(json.dumps(GOOD).encode(), secret=secret) as client,
        pytest.raises(RemoteProtocolError, match="signed"),
    ):
        await client.describe()


async def test_an_answer_to_another_request_is_refused():
    with (
        answering(json.dumps(GOOD).encode(), id_of=lambda _: "msg_other") as client,
        pytest.raises(RemoteProtocolError, match="signed"),
    ):
        await client.describe()


async def test_too_much_is_not_read():
    with answering(b"x" * (MAX_ANSWER_BYTES + 1)) as client, pytest.raises(RemoteProtocolError, match="over"):
        await client.describe()


async def test_a_remote_that_hangs_is_unreachable_in_time():
    with answering(json.dumps(GOOD).encode()) as client:
        release = threading.Event()

        def hang(told):
            release.wait(5)
            return told

        with answering(b"{}", id_of=hang) as hanging:
            begun = time.monotonic()
            with pytest.raises(RemoteUnreachable):
                await hanging.describe()
            assert time.monotonic() - begun < 2.5
            release.set()
        await client.describe()


@pytest.mark.parametrize("status", [502, 504])
async def test_a_proxys_error_is_not_the_environments(status):
    with answering(b"bad gateway", status=status, secret=None) as client, pytest.raises(RemoteUnreachable):
        await client.describe()


async def test_a_wish_for_patience_is_bounded_however_long_it_is():
    busy = answering(b"", status=503, secret=None, headers={"retry-after": "1e9"})
    with busy as client, pytest.raises(RemoteBusy):
        await client.describe()


@pytest.mark.parametrize(
    ("wish", "least", "most"),
    [("0.3", 0.3, 0.36), ("1e9", 10, 12), ("-5", 0.05, 0.06), ("nan", 1, 1.2), ("soon", 1, 1.2), ("inf", 1, 1.2)],
)
def test_a_wish_is_followed_within_bounds(wish, least, most):
    assert least <= _retry_after_s(Answer(429, b"", {"retry-after": wish})) <= most


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unknown", 404, RemoteEnded),
        ("ended", 410, RemoteEnded),
        ("failed", 500, RemoteFailed),
        ("step_out_of_order", 409, RemoteDiverged),
        ("something_new", 418, RemoteProtocolError),
    ],
)
async def test_errors_by_their_codes(code, status, kind):
    with answering(error(code), status=status) as client, pytest.raises(kind, match=code):
        await client.ask(Ask.WORLD_CALL, Called, handle="h")


async def test_an_error_without_one_is_a_broken_protocol():
    with (
        answering(b'{"version": 1}', status=400) as client,
        pytest.raises(RemoteProtocolError, match="without an error"),
    ):
        await client.ask(Ask.DESCRIBE, Described)


BAD_RESULTS = {
    "nothing": {},
    "both": {"reward": 1.0, "error": {"fault": "environment"}},
    "over one": {"reward": 1.01},
    "below zero": {"scores": {"a": -0.1}},
    "not a number": {"reward": "1"},
    "a strange name": {"scores": {"A b": 1.0}},
    "a NUL, which no database stores": {"error": {"fault": "environment", "message": "a\0b"}},
    "too many": {"scores": {f"s{n}": 0.0 for n in range(101)}},
    "the policy's error": {"error": {"fault": "policy"}},
    "an unknown fault": {"error": {"fault": "nobody"}},
}


@pytest.mark.parametrize("result", BAD_RESULTS.values(), ids=BAD_RESULTS)
async def test_a_result_that_is_none_is_refused(result):
    body = json.dumps({"version": 1, "session": "s", "state": "ended", "result": result}).encode()
    with answering(body) as client, pytest.raises(RemoteProtocolError, match="does not allow"):
        await client.ask(Ask.SESSION_STATUS, SessionTold, session="s")


@pytest.mark.parametrize(
    "url", ["http://:word@127.0.0.1:9/", "http://name@127.0.0.1:9/", "ftp://127.0.0.1/", "http://h/#f"]
)
async def test_a_url_with_a_password_in_it_is_never_asked(url):
    with pytest.raises(RemoteProtocolError, match="without credentials"):
        await RemoteClient(RemotePlace(url, SECRET), answer_s=1.0).describe()


def test_reward_and_scores_are_reported_together():
    assert Result(reward=0.5, scores={"style": 1.0}).reported == {"reward": 0.5, "style": 1.0}
    assert Result(reward=0.5, scores={"reward": 1.0}).reported == {"reward": 0.5}
    assert Result(scores={"reward": 1.0}).reported == {"reward": 1.0}
