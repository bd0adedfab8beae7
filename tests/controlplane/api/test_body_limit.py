"""Bodies are bounded before Django spools them."""

from __future__ import annotations

import json

from asgiref.testing import ApplicationCommunicator

from controlplane.api.body_limit import body_limited


async def drain(scope, receive, send) -> None:
    """An application that reads the whole body, as Django does, and answers its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def ask(chunks: list[bytes], announced: bytes | None = None) -> tuple[int, bytes]:
    headers = [(b"content-length", announced)] if announced else []
    client = ApplicationCommunicator(body_limited(drain, limit=10), {"type": "http", "headers": headers})
    for index, chunk in enumerate(chunks):
        await client.send_input({"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1})
    start, body = await client.receive_output(2), await client.receive_output(2)
    await client.wait(2)
    return start["status"], body["body"]


async def test_bodies_up_to_the_limit_pass() -> None:
    assert await ask([b"12345", b"67890"]) == (200, b"10")


async def test_a_streamed_body_over_the_limit_is_413() -> None:
    status, body = await ask([b"12345", b"678901", b"never read"])
    assert (status, json.loads(body)["code"]) == (413, "too_large")


async def test_an_announced_body_over_the_limit_is_413_unread() -> None:
    assert (await ask([b""], announced=b"11"))[0] == 413
    assert (await ask([b""], announced=b"9" * 30))[0] == 413
    assert (await ask([b""], announced=b"junk"))[0] == 200
