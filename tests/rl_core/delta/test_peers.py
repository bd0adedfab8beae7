"""What a replica takes from its peers, and what it does not."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from blake3 import blake3

from rl_core.delta.manifest import Segment
from rl_core.delta.peers import PeerSegments, Wanted

DATA = bytes(range(256)) * 64
SEGMENT = Segment("segments/0000-x", len(DATA), blake3(DATA).hexdigest())


@contextmanager
def peer(body: bytes, **headers: str) -> Iterator[str]:
    """A peer that answers every question with these bytes; its URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str, *, interrupted: bool = False) -> bytearray | None:
    peers = PeerSegments([url], token="t", wanted=Wanted(), interrupted=lambda: interrupted)
    try:
        return peers.fetch(SEGMENT, on_bytes=lambda count: None)
    finally:
        peers.close()


def test_a_peer_s_bytes_are_taken_as_they_are() -> None:
    with peer(DATA) as url:
        assert ask(url) == DATA


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_nothing_that_a_peer_encoded_is_decoded(coding: str) -> None:
    """A few bytes would decode into gigabytes before anybody could count them."""
    with peer(gzip.compress(DATA), Content_Encoding=coding) as url:
        assert ask(url) is None


def test_an_update_that_is_wanted_no_longer_leaves_its_peers() -> None:
    with peer(DATA) as url:
        assert ask(url, interrupted=True) is None
    peers = PeerSegments([], token="t", wanted=Wanted(), interrupted=lambda: True)
    assert peers.fetch(SEGMENT, on_bytes=lambda count: None) is None
    peers.close()
