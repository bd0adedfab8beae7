"""Rules that worlds and environments share: signatures, versions, refusals. And how a rule asks."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_core import signing
from rl_core.environments.remote.protocol import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, VERSION, Json

ANSWER_S = 20.0


class Broken(Exception):
    """The server does not keep the rule; the message says what it did."""


class Unanswered(Exception):
    """No HTTP answer came."""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, verified unless it was asked for otherwise."""

    status: int
    body: Json
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """The code of its error."""
        error = self.body.get("error")
        return str(error.get("code")) if isinstance(error, dict) else ""


@dataclass(slots=True)
class Peer:
    """The server under test."""

    url: str
    secret: str
    listen: str = "127.0.0.1"

    def ask(self, ask: str, **fields: Any) -> Told:
        """A good request. Raises: Broken when its answer is not signed for it, or no object of version 1."""
        return self.send(json.dumps({"version": VERSION, "type": ask, **fields}).encode())

    def send(self, body: bytes, headers: dict[str, str] | None = None) -> Told:
        """Any body, under a good signature or under given headers. Raises: Broken, Unanswered."""
        signed = signing.sign(self.secret, body) if headers is None else headers
        status, answered, text = self.raw(body, signed)
        asked_id = signed.get(signing.ID, answered.get(signing.ID, ""))
        if answered.get(signing.ID) != asked_id or not signing.verified([self.secret], answered, text):
            raise Broken(f"the answer ({status}) is not signed under the id of its request")
        try:
            told = json.loads(text)
        except ValueError:
            raise Broken(f"the answer ({status}) is no JSON") from None
        if not isinstance(told, dict) or told.get("version") != VERSION:
            raise Broken(f"the answer ({status}) does not carry version {VERSION}")
        return Told(status, told, answered)

    def raw(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. Raises: Unanswered, Broken for too long an answer."""
        request = urllib.request.Request(  # noqa: S310  # the operator's own argument
            self.url, data=body, headers={"content-type": "application/json", **headers}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
                return answer.status, _lowered(answer.headers), _bounded(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _lowered(error.headers), _bounded(error)
        except OSError as error:
            raise Unanswered(str(error)) from error


def expect(told: Told, status: int, code: str) -> None:
    """Raises: Broken unless the answer is that error."""
    if (told.status, told.code) != (status, code):
        raise Broken(f"expected {status} {code}, got {told.status} {told.code or 'without an error'}")


def good(told: Told) -> Json:
    """The body of an answer that must be good. Raises: Broken."""
    if told.status != 200:
        raise Broken(f"expected 200, got {told.status} {told.code}")
    return told.body


def require(holds: object, otherwise: str) -> None:
    """Raises: Broken."""
    if not holds:
        raise Broken(otherwise)


def fresh_id() -> str:
    """A key or session id that was never used."""
    return f"conformance-{uuid.uuid4().hex}"


def it_describes_itself(peer: Peer) -> None:
    """Kind, tools where it is a world, and an example to try."""
    told = good(peer.ask("describe"))
    require(told.get("kind") in ("world", "environment"), f"kind is {told.get('kind')!r}")
    require(isinstance(told.get("example", {}).get("task"), dict), "example.task is missing")
    tools = told.get("tools", [])
    if told["kind"] == "world":
        require(tools and len({tool["name"] for tool in tools}) == len(tools), "a world needs tools, each name once")


def unsigned_requests_are_refused(peer: Peer) -> None:
    """401."""
    expect(peer.send(_describe(), {}), 401, "unsigned")


def wrong_signatures_are_refused(peer: Peer) -> None:
    """A signature of another body is none."""
    body = _describe()
    expect(peer.send(body, signing.sign(peer.secret, body + b" ")), 401, "unsigned")


def old_signatures_are_refused(peer: Peer) -> None:
    """So that what was overheard cannot be said again later."""
    body = _describe()
    expect(peer.send(body, signing.sign(peer.secret, body, now_s=time.time() - 3600)), 401, "unsigned")


def other_versions_are_refused(peer: Peer) -> None:
    """With the versions that it speaks."""
    told = peer.send(json.dumps({"version": 999, "type": "describe"}).encode())
    expect(told, 400, "unsupported_version")
    require(VERSION in told.body["error"].get("versions", []), "the error does not say which versions are spoken")


def unknown_types_are_refused(peer: Peer) -> None:
    """400, never ignored."""
    expect(peer.ask("world.explode"), 400, "unknown_type")


def what_is_no_message_is_refused(peer: Peer) -> None:
    """Signed garbage is garbage."""
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        expect(peer.send(body), 400, "malformed")


def requests_over_a_mebibyte_are_refused(peer: Peer) -> None:
    """413, or the connection is closed before all has been sent."""
    body = json.dumps({"version": VERSION, "type": "describe", "x": "x" * MAX_REQUEST_BYTES}).encode()
    try:
        status, _, _ = peer.raw(body, signing.sign(peer.secret, body))
    except Unanswered:
        return
    require(status == 413, f"expected 413, got {status}")


RULES: list[Callable[[Peer], None]] = [
    it_describes_itself,
    unsigned_requests_are_refused,
    wrong_signatures_are_refused,
    old_signatures_are_refused,
    other_versions_are_refused,
    unknown_types_are_refused,
    what_is_no_message_is_refused,
    requests_over_a_mebibyte_are_refused,
]


def _describe() -> bytes:
    return json.dumps({"version": VERSION, "type": "describe"}).encode()


def _lowered(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _bounded(answer: Any) -> bytes:
    text: bytes = answer.read(MAX_ANSWER_BYTES + 1)
    if len(text) > MAX_ANSWER_BYTES:
        raise Broken(f"the answer is over {MAX_ANSWER_BYTES} bytes")
    return text
