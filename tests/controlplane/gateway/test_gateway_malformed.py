"""Malformed requests: whatever is sent, the client is told what is wrong with it, and never that the server is."""

import json
import random

import httpx
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async

from benchmarks.scripted_engine import Reply, ScriptedEngine

pytestmark = pytest.mark.django_db(transaction=True)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["x"]}}}
CHAT = {
    "model": "assistant",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "user": "u",
    "metadata": {"a": "b"},
}
COMPLETION = {"model": "assistant", "prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2, "logprobs": 1, "stop": "x"}
HEADERS = (
    "X-Slipway-User",
    "X-Slipway-Session",
    "X-Slipway-Segment",
    "X-Slipway-Consent",
    "X-Request-ID",
    "Content-Type",
    "Accept",
)
TEXTS = (
    "",
    "\x00",
    "a" * 300,
    "é\u2028",
    "😀" * 70,
    "<|im_end|>",
    "none",
    "{{ 7 * 7 }}",
    "{% for %}",
    "-1",
    "null",
    "\ufffe",
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(10**40), 1e308, -1e-320, 0.1, 3.5)


def odd_value(rng, depth=0):
    """A JSON value that nobody asked for."""
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.choice(([], {}, [[]], [None], {"": ""}))
    if kind == 4:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(TEXTS) or "k": odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    nested = rng.choice(("x", 1, None))
    for _ in range(rng.randrange(1, 400)):
        nested = rng.choice(([nested], {"a": nested}))
    return nested


def mutate(rng, value):
    """The value with something wrong somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        choice = rng.random()
        if choice < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if choice < 0.15:
            return {**value, rng.choice(TEXTS): odd_value(rng)}
        return {**value, key: mutate(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(rng, value[at]), *value[at + 1 :]]
    return odd_value(rng)


def damaged(rng, data):
    """Bytes that may be no JSON at all."""
    choice = rng.randrange(5)
    at = rng.randrange(len(data))
    if choice == 0:
        return data[:at]
    if choice == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if choice == 2:
        return (
            data[:at] + rng.choice((b"\xff\xfe", b"\\ud800", b"\\u0000", b"NaN", b"1e999", b"//", b"\x00")) + data[at:]
        )
    if choice == 3:
        return rng.choice((b"[", b'{"a":', b'"')) * rng.randrange(1, 60_000)
    return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))


def malformed(rng):
    """One request: method, path, headers, body."""
    path, valid = rng.choice((("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)))
    value = valid
    for _ in range(rng.randrange(1, 4)):
        value = mutate(rng, value)
    if isinstance(value, dict) and rng.random() < 0.3:
        value["stream"] = rng.choice((True, True, False, 1, "yes"))
    body = json.dumps(value).encode()
    if rng.random() < 0.25:
        body = damaged(rng, body)
    headers = {}
    if rng.random() < 0.3:
        odd = (b"\xff\xfe", b"a" * 300, b"all", b"train", "Zoë".encode(), b"", b"text/plain", b"a\tb", b"\x7f")
        headers[rng.choice(HEADERS)] = rng.choice(odd)
    if rng.random() < 0.05:
        headers["Authorization"] = rng.choice(
            (b"Bearer", b"Bearer \xff", b"Basic x", b"", b"Bearer slw_x_" + b"y" * 9000)
        )
    method = "POST" if rng.random() < 0.97 else rng.choice(("GET", "PUT", "DELETE", "OPTIONS"))
    path += "" if rng.random() < 0.97 else rng.choice(("/", "/../x", "%00", "?stream=true"))
    return method, path, headers, body


@pytest_asyncio.fixture
async def send(bare, web):
    """Sends a request with a good key, unless it brings one of its own."""
    engine = ScriptedEngine(lambda body: Reply(tokens=[65], text="a"))
    async with engine.serving():
        await sync_to_async(bare.place)(engine.url)
        key = await sync_to_async(bare.key)()

        async def send(method, path, headers, body):
            own = {"Authorization": f"Bearer {key}".encode(), **headers}
            pairs = [(name.encode(), value) for name, value in own.items()]
            return await web.request(method, path, headers=pairs, content=body)

        yield send


async def hold(send, *, seed, count):
    rng = random.Random(seed)
    statuses = {}
    for number in range(count):
        request = malformed(rng)
        try:
            reply = await send(*request)
        except httpx.InvalidURL:
            continue
        assert reply.status_code < 500, (number, request, reply.text)
        if reply.status_code >= 400:
            error = reply.json()["error"]
            assert error["message"], (number, request)
            assert error["code"], (number, request)
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
    return statuses


async def test_malformed_requests_are_answered_with_4xx(send):
    statuses = await hold(send, seed=1, count=400)
    assert statuses[400] > 200
    assert statuses[200] > 10, "requests that are only odd, not wrong, are answered"
    assert {401, 404, 405} <= statuses.keys()


@pytest.mark.drill
@pytest.mark.timeout(900)
async def test_ten_thousand_malformed_requests_are_answered_with_4xx(send):
    statuses = await hold(send, seed=2, count=10_000)
    assert sum(statuses.values()) > 9_900
    assert statuses[400] > 5_000


async def test_a_body_that_is_too_long_or_never_ends(send, monkeypatch):
    from controlplane.gateway import responding

    monkeypatch.setattr(responding, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(responding, "BODY_TIMEOUT_S", 0.1)
    assert (await send("POST", "/v1/completions", {}, b"x" * 1001)).status_code == 413

    async def endless():
        import asyncio

        yield b"{"
        await asyncio.sleep(5)

    reply = await send("POST", "/v1/completions", {}, endless())
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "timeout")
