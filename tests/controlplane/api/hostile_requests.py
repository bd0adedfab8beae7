"""Malformed requests to every endpoint that takes events, drawn from a seed: broken JSON, wrong types, odd text, odd
headers, bodies that are properly signed and wrong all the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.lane_rows import thumbs

PATHS = ("/api/v1/feedback", "/api/v1/feedback/batch", "/api/v1/product-events", "/hooks/v1/")
EVENTS = (
    {"kind": "edit_observed", "before": "a b", "after": "a c", "now": "a", "after_s": 5},
    {"kind": "regenerated", "times": 2},
    {"kind": "copied", "characters": 3, "answer_characters": 9},
    {"kind": "decided", "accepted": True},
    {"kind": "waited", "first_token_ms": 1, "total_ms": 2},
    {"kind": "followed_up", "text": "no, again", "previous": "x"},
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e308,
        -(2**63),
        2**63,
        10**40,
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        "\udfff\ud800",
    ),
    *("true", "null", "NaN", "🙂" * 50, "\u202e\u0000", "x" * 300, "x" * 70_000, "../../etc/passwd", "' OR 1=1 --"),
    *(
        [],
        [[]],
        {},
        {"a": 1},
        [1, "2", None],
        {"": ""},
        {"\x00": 1},
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59Z",
    ),
    *("2024-02-30T00:00:00Z", "chatcmpl-", str(uuid.UUID(int=0)), "00000000-0000-0000-0000-00000000000g"),
)
RAW: tuple[bytes, ...] = (
    *(b"", b" ", b"{", b"}", b"[]", b"null", b"true", b"NaN", b"Infinity", b"-", b'"', b"\x00", b"\xff\xfe{}", b"0x10"),
    *(b"[" * 60_000, b'{"a":' * 30_000, b'{"items":' + b"[" * 60_000, b"9" * 6000, b'{"value":' + b"9" * 6000 + b"}"),
    *('{"a":1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b'{"a":1,"a":2}', b'{"items":[{}],"items":[]}', b'{"\\ud800":1}'),
    *(b"a=1&b=2", b"--x\r\nContent-Disposition: form-data\r\n\r\n", b"<xml/>", b'{"items":[' + b"{}," * 600 + b"{}]}"),
    b"x" * 1_100_000,
)
MEDIA = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "",
    "multipart/form-data",
    "a/b/c",
    "*/*",
)


class HostileRequest(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


def hostile_requests(
    *, seed: int, count: int, key: str, source: str, secret: str, generation_id: Any
) -> Iterator[HostileRequest]:
    """So many, most of them with good credentials: what is refused before it is looked at proves little.

    One in fifty is the one before it, sent again.
    """
    drawn = random.Random(seed)
    request: HostileRequest | None = None
    for _ in range(count):
        if request is not None and drawn.random() < 0.02:
            yield request
            continue
        path = drawn.choice(PATHS)
        body = _body(drawn, path, generation_id)
        headers = {"Content-Type": "application/json" if drawn.random() < 0.9 else drawn.choice(MEDIA)}
        if path == "/hooks/v1/":
            path += source if drawn.random() < 0.97 else drawn.choice(("nobody", "%00", "a" * 300, "%ff"))
            headers |= _signed(drawn, secret, body)
        elif drawn.random() < 0.97:
            headers["Authorization"] = f"Bearer {key}"
        else:
            headers["Authorization"] = drawn.choice(("", "Bearer", "Bearer \xff", "Basic eDp5", f"Bearer {key} {key}"))
        request = HostileRequest(path, headers, body)
        yield request


def _body(drawn: random.Random, path: str, generation_id: Any) -> bytes:
    if drawn.random() < 0.1:
        return drawn.choice(RAW)
    event = _event(drawn, path, generation_id)
    body: Any = event
    if path in PATHS[1:3]:
        body = {"items": [event, *(_event(drawn, path, generation_id) for _ in range(drawn.randrange(3)))]}
    for _ in range(drawn.randrange(3)):
        body = _changed(drawn, body)
    raw = json.dumps(body, ensure_ascii=drawn.random() < 0.7).encode("utf-8", "surrogatepass")
    return _damaged(drawn, raw) if drawn.random() < 0.2 else raw


def _event(drawn: random.Random, path: str, generation_id: Any) -> dict[str, Any]:
    target = generation_id if drawn.random() < 0.7 else uuid.UUID(int=drawn.getrandbits(128))
    body = thumbs(target, comment="fine", tags={"a": "b"}, event_id=str(uuid.UUID(int=drawn.getrandbits(128))))
    if path != PATHS[2]:
        return body
    return {name: value for name, value in body.items() if name not in ("signal", "value", "comment")} | {
        "event": dict(drawn.choice(EVENTS))
    }


def _changed(drawn: random.Random, value: Any) -> Any:
    """The same with one thing somewhere inside replaced, taken away or added."""
    if isinstance(value, dict) and value and drawn.random() < 0.85:
        key, act = drawn.choice(list(value)), drawn.random()
        if act < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if act < 0.25:
            return {**value, drawn.choice(("extra", "", "\x00", "items", "event_id")): drawn.choice(ODD)}
        return {**value, key: _changed(drawn, value[key])}
    if isinstance(value, list) and value and drawn.random() < 0.85:
        place = drawn.randrange(len(value))
        return [*value[:place], _changed(drawn, value[place]), *value[place + 1 :]]
    return drawn.choice(ODD)


def _damaged(drawn: random.Random, raw: bytes) -> bytes:
    place = drawn.randrange(len(raw))
    junk = bytes(drawn.randrange(256) for _ in range(drawn.randrange(4)))
    return drawn.choice((raw[:place], raw[:place] + junk + raw[place:], raw[:place] + junk + raw[place + 1 :]))


def _signed(drawn: random.Random, secret: str, body: bytes) -> dict[str, str]:
    stamp, identity = str(int(time.time())), f"msg_{drawn.getrandbits(32)}"
    mac = hmac.new(
        base64.b64decode(secret.removeprefix("whsec_")), f"{identity}.{stamp}.".encode() + body, hashlib.sha256
    )
    signature = f"v1,{base64.b64encode(mac.digest()).decode()}"
    if drawn.random() < 0.9:
        return {"webhook-id": identity, "webhook-timestamp": stamp, "webhook-signature": signature}
    return {
        "webhook-id": drawn.choice(("", identity, "\xff", "a" * 500)),
        "webhook-timestamp": drawn.choice(("", "-1", "9" * 400, "1e9", stamp, "\xb2")),
        "webhook-signature": drawn.choice(
            ("", "v1", "v1,", "v1,\xff", f"v2,{signature}", f"v1,x {signature}", signature * 20)
        ),
    }
