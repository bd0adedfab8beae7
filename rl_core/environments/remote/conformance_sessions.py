"""Rules of remote environments: a session is played once, asks the endpoint it was given, and reports in bounds."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rl_core import signing
from rl_core.environments.remote.conformance_common import Peer, Told, expect, fresh_id, good, require
from rl_core.environments.remote.protocol import Json

WAIT_S = 60.0
KEY = "conformance-key"
REPLY = "I have no idea."


@dataclass(slots=True)
class _Stage:
    """Our side of a session: an endpoint of the policy and a callback. `hold` keeps the policy from answering."""

    secret: str
    url: str = ""
    keys: list[str] = field(default_factory=list)
    results: list[Json] = field(default_factory=list)
    unsigned: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    reported: threading.Event = field(default_factory=threading.Event)

    def complete(self, key: str, body: bytes) -> tuple[str, bytes]:
        """The policy's answer, whole or as a stream: its type and its bytes."""
        self.keys.append(key)
        self.asked.set()
        self.hold.wait(WAIT_S)
        asked = json.loads(body)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        told = {"id": "chatcmpl-1", "created": int(time.time()), "model": "policy"}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": REPLY, "refusal": None}
            choice: Json = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            whole = {**told, "object": "chat.completion", "choices": [choice], "usage": usage}
            return "application/json", json.dumps(whole).encode()
        deltas: list[Json] = [{"role": "assistant", "content": ""}, {"content": REPLY}, {}]
        chunks = [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"} for delta in deltas]
        lines: list[Json] = [{**told, "object": "chat.completion.chunk", "choices": [chunk]} for chunk in chunks]
        if (asked.get("stream_options") or {}).get("include_usage"):
            lines.append({**told, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        return "text/event-stream", b"".join(b"data: %s\n\n" % text for text in [*map(_json, lines), b"[DONE]"])

    def report(self, headers: dict[str, str], body: bytes) -> int:
        """A result at the callback; its status."""
        if not signing.verified([self.secret], headers, body):
            self.unsigned += 1
            return 401
        self.results.append(json.loads(body))
        self.reported.set()
        return 200


class _Handler(BaseHTTPRequestHandler):
    stage: _Stage

    def do_POST(self) -> None:  # the standard library's name
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path.endswith("/chat/completions"):
            kind, text = self.stage.complete(headers.get("authorization", "").removeprefix("Bearer "), body)
            status = 200
        else:
            status = self.stage.report(headers, body)
            kind, text = "application/json", b"{}"
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the standard library's name
        """Say nothing for each request."""


@contextlib.contextmanager
def _staged(peer: Peer, *, held: bool = False) -> Iterator[_Stage]:
    stage = _Stage(peer.secret)
    if not held:
        stage.hold.set()
    server = ThreadingHTTPServer((peer.listen, 0), type("Handler", (_Handler,), {"stage": stage}))
    server.daemon_threads = True
    stage.url = f"http://{peer.listen}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield stage
    finally:
        stage.hold.set()
        server.shutdown()
        server.server_close()


def _start(peer: Peer, stage: _Stage, session: str, **other: object) -> Told:
    fields = {
        "task": good(peer.ask("describe"))["example"]["task"],
        "model": {"base_url": f"{stage.url}/v1", "api_key": KEY, "name": "policy"},
        "limits": {"max_turns": 8, "max_context_tokens": 4096},
        "deadline_s": WAIT_S,
        "callback": f"{stage.url}/result",
    }
    return peer.ask("session.start", session=session, **(fields | other))


def a_session_asks_the_endpoint_and_reports(peer: Peer) -> None:
    """With its key as a bearer; the result is signed, names its session, and lies in [0, 1]."""
    session = fresh_id()
    with _staged(peer) as stage:
        told = good(_start(peer, stage, session))
        require(told.get("session") == session and told.get("state") in ("running", "ended"), f"told {told}")
        require(stage.asked.wait(WAIT_S), f"the endpoint was not asked within {WAIT_S:g} s")
        require(stage.reported.wait(WAIT_S), f"no signed result came within {WAIT_S:g} s")
        require(set(stage.keys) == {KEY}, "the endpoint was asked under another key")
        message = stage.results[0]
        named = (message.get("version"), message.get("type"), message.get("session"))
        require(named == (1, "session.result", session), f"the result names {named}")
        result = message["result"]
        _check_result(result)
        status = good(peer.ask("session.status", session=session))
        require(status.get("state") == "ended" and status.get("result") == result, "status says otherwise")


def starting_again_plays_once(peer: Peer) -> None:
    """The first answer may have been lost."""
    session = fresh_id()
    with _staged(peer, held=True) as stage:
        for _ in range(3):
            good(_start(peer, stage, session))
        require(stage.asked.wait(WAIT_S), "the endpoint was not asked")
        time.sleep(0.5)
        require(len(stage.keys) == 1, f"{len(stage.keys)} sessions were played")
        stage.hold.set()
        require(stage.reported.wait(WAIT_S), "no result came")
        good(_start(peer, stage, session))
        time.sleep(0.5)
        require(len(stage.results) == 1, "the session was played again after its end")


def an_id_of_another_task_is_refused(peer: Peer) -> None:
    """409."""
    session = fresh_id()
    with _staged(peer) as stage:
        good(_start(peer, stage, session))
        task = {**good(peer.ask("describe"))["example"]["task"], "id": "another"}
        expect(_start(peer, stage, session, task=task), 409, "session_conflict")


def a_cancelled_session_reports_nothing(peer: Peer) -> None:
    """Nobody wants its result."""
    session = fresh_id()
    with _staged(peer, held=True) as stage:
        good(_start(peer, stage, session))
        require(stage.asked.wait(WAIT_S), "the endpoint was not asked")
        require(good(peer.ask("session.cancel", session=session)).get("state") == "cancelled", "it is not cancelled")
        stage.hold.set()
        require(not stage.reported.wait(1.0), "a result was reported all the same")
        require(good(peer.ask("session.status", session=session)).get("state") == "cancelled", "it went on")


def an_unknown_session_is_unknown(peer: Peer) -> None:
    """404."""
    for ask in ("session.status", "session.cancel"):
        expect(peer.ask(ask, session=fresh_id()), 404, "unknown")


def malformed_sessions_are_refused(peer: Peer) -> None:
    """400: without a task, an endpoint or a deadline there is nothing to play."""
    with _staged(peer) as stage:
        wrongs: list[Json] = [{"task": 1}, {"model": {}}, {"deadline_s": -1}, {"callback": ""}]
        for wrong in wrongs:
            expect(_start(peer, stage, fresh_id(), **wrong), 400, "malformed")


RULES: list[Callable[[Peer], None]] = [
    a_session_asks_the_endpoint_and_reports,
    starting_again_plays_once,
    an_id_of_another_task_is_refused,
    a_cancelled_session_reports_nothing,
    an_unknown_session_is_unknown,
    malformed_sessions_are_refused,
]


def _json(value: Json) -> bytes:
    return json.dumps(value).encode()


def _check_result(result: Json) -> None:
    scores = {**result.get("scores", {}), **({"reward": result["reward"]} if "reward" in result else {})}
    require(scores, f"the result has neither reward nor scores: {json.dumps(result)[:200]}")
    for name, value in scores.items():
        good_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(good_number and 0 <= value <= 1, f"{name} is {value!r}, not in [0, 1]")
    require(result.get("ending", "terminated") in ("terminated", "truncated"), f"ending is {result.get('ending')!r}")
