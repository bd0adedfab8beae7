"""The customer's side: a reference server for worlds and environments. Standard library alone.

    python -m rl_core.environments.remote.server package.module:object --secret-file FILE --port 9000

serves an object that has the shape of `CustomerWorld` or `CustomerEnvironment`. Sessions are kept in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl_core import signing
from rl_core.environments.remote.protocol import MAX_REQUEST_BYTES, VERSION, Ask, Json, Refusal, Refused
from rl_core.environments.remote.sessions import CustomerEnvironment, Sessions
from rl_core.environments.remote.worlds import CustomerWorld, Worlds

_READ_S = 30.0
_SEND_S = 10.0
_DRAIN_BYTES = 16 << 20


class RemoteServer:
    """Answers requests, whatever carries them: verified, then read, then acted on; every answer signed."""

    def __init__(self, offered: CustomerWorld | CustomerEnvironment, *, secret: str, **options: Any) -> None:
        signing.key_of(secret)
        self._secret = secret
        self._does: dict[str, Callable[[Json], Json]]
        if isinstance(offered, CustomerEnvironment):
            sessions = Sessions(offered, send=self.send, **options)
            self._does = {
                Ask.DESCRIBE: lambda _: sessions.description(),
                Ask.SESSION_START: sessions.start,
                Ask.SESSION_STATUS: sessions.status,
                Ask.SESSION_CANCEL: sessions.cancel,
            }
        else:
            worlds = Worlds(offered, **options)
            self._does = {
                Ask.DESCRIBE: lambda _: worlds.description(),
                Ask.WORLD_OPEN: worlds.open,
                Ask.WORLD_CALL: worlds.call,
                Ask.WORLD_EXPORT: worlds.export,
                Ask.WORLD_CLOSE: worlds.close,
            }

    def handle(self, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one POST. Names of the request's headers are lower-case."""
        retry_after_s = 0.0
        try:
            status, told = 200, self.answer(headers, body)
        except Refused as refused:
            status, told, retry_after_s = refused.status, refused.body, refused.retry_after_s
        except Exception as error:  # noqa: BLE001  # the customer's code: say so, and go on serving
            traceback.print_exc()
            failed = Refused(Refusal.FAILED, f"{type(error).__name__}: {error}")
            status, told = failed.status, failed.body
        answer = json.dumps({"version": VERSION, **told}).encode()
        signed = self.signed(answer, headers.get(signing.ID, ""))
        waiting = {"retry-after": f"{retry_after_s:g}"} if retry_after_s else {}
        return status, {"content-type": "application/json", **waiting, **signed}, answer

    def answer(self, headers: Mapping[str, str], body: bytes) -> Json:
        """What the request asks for. Raises: Refused."""
        if len(body) > MAX_REQUEST_BYTES:
            raise Refused(Refusal.TOO_LARGE, f"a request has at most {MAX_REQUEST_BYTES} bytes")
        if not signing.verified([self._secret], headers, body):
            raise Refused(Refusal.UNSIGNED, "the signature is missing, wrong or older than five minutes")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Refused(Refusal.MALFORMED, "the body is not a JSON object")
        if message.get("version") != VERSION:
            raise Refused(Refusal.UNSUPPORTED_VERSION, f"this server speaks version {VERSION}", versions=[VERSION])
        does = self._does.get(str(message.get("type")))
        if does is None:
            raise Refused(Refusal.UNKNOWN_TYPE, f"this server does not know {str(message.get('type'))[:40]!r}")
        return does(message)

    def signed(self, answer: bytes, request_id: str) -> dict[str, str]:
        """Headers that sign an answer under its request's id."""
        return signing.sign(self._secret, answer, message_id=request_id)

    def send(self, url: str, message: Json) -> int:
        """Post a signed message of ours; the status of its answer. Raises: OSError."""
        body = json.dumps(message).encode()
        headers = {"content-type": "application/json", **signing.sign(self._secret, body)}
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310  # from a signed request
        try:
            with urllib.request.urlopen(request, timeout=_SEND_S) as answer:  # noqa: S310
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _READ_S
    remote: RemoteServer

    def do_POST(self) -> None:  # the standard library's name
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True
            self._drain(int(length) if length.isdigit() else 0)
            self._write(*self.remote.handle({}, b"x" * (MAX_REQUEST_BYTES + 1)))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._write(*self.remote.handle(headers, self.rfile.read(int(length))))

    def _drain(self, length: int) -> None:
        """Read what is coming, in bounds: a sender that is cut off in the middle does not read its answer."""
        left = min(length, _DRAIN_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)

    def _write(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the standard library's name
        """Say nothing for each request."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def http_server(remote: RemoteServer, *, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """An HTTP server for it, bound and not yet serving; port 0 chooses one."""
    return _HttpServer((host, port), type("Handler", (_Handler,), {"remote": remote}))


@contextlib.contextmanager
def serving(remote: RemoteServer, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a thread; the URL to ask at."""
    server = http_server(remote, host=host, port=port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(prog="python -m rl_core.environments.remote.server", description=__doc__)
    parser.add_argument("object", help="package.module:object, a world or an environment")
    parser.add_argument("--secret-file", type=Path, required=True, help="a file with the secret, whsec_...")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args(arguments)
    module, _, name = options.object.partition(":")
    sys.path.insert(0, "")
    try:
        offered = getattr(importlib.import_module(module), name)
        remote = RemoteServer(offered, secret=options.secret_file.read_text().strip())
        server = http_server(remote, host=options.host, port=options.port)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"serving {options.object} at http://{options.host}:{server.server_address[1]}/\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
