"""A real S3 protocol server (moto's) over loopback, and a proxy in front of it that fails as object stores fail."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

BUCKET = "slipway"
_CHUNK_BYTES = 4096


class Fault(StrEnum):
    """What the proxy does to a request."""

    ERROR = "500"  # refused before it took effect
    BUSY = "503"  # S3's SlowDown
    LOST = "lost"  # it took effect, and 500 is the answer
    SLOW = "slow"  # half the answer, a wait, the rest
    SHORT = "short"  # half the answer, and the connection is closed


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body_bytes: int


@dataclass
class S3Server:
    """`faults` decides for each request; `requests` are those that came; `moved` is told of each chunk in between."""

    endpoint: str
    moto_port: int
    faults: Callable[[Request], Fault | None] = lambda request: None
    moved: Callable[[Request, int], None] = lambda request, count: None
    overwrites: bool = False  # ignore If-None-Match, as some servers do
    requests: list[Request] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def url(self) -> str:
        """A prefix of its own."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def reset(self) -> None:
        self.faults, self.moved, self.overwrites = (lambda request: None), (lambda request, count: None), False
        self.requests.clear()


def now_and_then(*, every: int, seed: int = 0) -> Callable[[Request], Fault | None]:
    """About one request in `every` fails, in each way in turn; what took effect is never called failed."""
    generator = random.Random(seed)
    kinds = itertools.cycle([Fault.ERROR, Fault.BUSY, Fault.SHORT, Fault.SLOW])
    return lambda request: next(kinds) if generator.randrange(every) == 0 else None


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    moto_port = moto.get_host_and_port()[1]
    assert httpx.put(f"http://127.0.0.1:{moto_port}/{BUCKET}", headers={"x-amz-acl": "public-read"}).status_code == 200
    proxy = _Proxy(("127.0.0.1", 0), _Handler)
    proxy.s3 = S3Server(f"http://127.0.0.1:{proxy.server_address[1]}", moto_port)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield proxy.s3
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    s3: S3Server

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Silence."""

    def _serve(self) -> None:
        s3 = self.server.s3
        size = int(self.headers.get("Content-Length", 0))
        request = Request(self.command, self.path, dict(self.headers), size)
        s3.requests.append(request)
        body = b""
        while len(body) < size and (chunk := self.rfile.read(min(_CHUNK_BYTES, size - len(body)))):
            body += chunk
            s3.moved(request, len(chunk))
        if len(body) < size:  # the client died
            self.close_connection = True
            return
        fault = s3.faults(request)
        if fault in (Fault.ERROR, Fault.BUSY):
            self._refuse(int(fault))
            return
        answer, content = self._forward(body)
        if fault is Fault.LOST:
            self._refuse(500)
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        head = self.command == "HEAD"
        self.send_header("Content-Length", (answer.getheader("Content-Length") or "0") if head else str(len(content)))
        self.end_headers()
        if not head:
            self._answer(request, content, fault)

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {
            name: value
            for name, value in self.headers.items()
            if not (self.server.s3.overwrites and name.lower() == "if-none-match")
        }
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.s3.moto_port, timeout=30)
        try:
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            return answer, answer.read()
        finally:
            upstream.close()

    def _answer(self, request: Request, content: bytes, fault: Fault | None) -> None:
        half = len(content) // 2
        self._send(request, content[:half])
        self.wfile.flush()
        if fault is Fault.SHORT and content:
            self.close_connection = True
            return
        if fault is Fault.SLOW:
            time.sleep(0.2)
        self._send(request, content[half:])

    def _send(self, request: Request, content: bytes) -> None:
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            self.server.s3.moved(request, len(chunk))
            self.wfile.write(chunk)

    def _refuse(self, status: int) -> None:
        content = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815 (the names that http.server looks for)
