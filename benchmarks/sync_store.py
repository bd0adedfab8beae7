"""A store's folder over HTTP on loopback, as a plain file server gives it out: ranges, and the kernel's own copying."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL under which `folder` can be read."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, folder=folder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: Any, folder: Path) -> None:
        self._root = folder
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send a file or a range of it."""
        path = self._root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        with path.open("rb") as file:
            self.connection.sendfile(file, start, end - start)

    do_HEAD = do_GET  # noqa: N815 (the names that http.server looks for)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Silence."""
