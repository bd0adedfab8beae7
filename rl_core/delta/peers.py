"""Replicas of one cluster share what they fetch: one reads a segment from the store, the others take it from that one.

A replica that wants a segment asks its peers over HTTP, `GET /v1/segments/<blake3>?ticket=…`: 200 with the bytes, 202
when they are on their way there, 404 when they are not. Of replicas that want the same segment at once, the one with
the lowest ticket goes to the store: nobody waits for somebody who waits for it. What peers send is verified like all
else, so that they need not be trusted; whoever sends something else, or nothing in time, is not asked again for that
update.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import httpx
from blake3 import blake3

from rl_core.delta.fetch import OnBytes
from rl_core.delta.manifest import Segment
from rl_core.errors import Interrupted

_PATIENCE_S: Final = 60.0  # for one segment of one peer
_TIMEOUT: Final = httpx.Timeout(10.0, connect=2.0)

log = logging.getLogger(__name__)


class Wanted:
    """What one replica wants now, so that it can tell its peers. Safe to share between threads."""

    def __init__(self) -> None:
        self._tickets: dict[str, str] = {}  # by digest; empty: the store is being read
        self._lock = threading.Lock()

    def ask_peers(self, digest: str, ticket: str) -> None:
        """The peers are being asked for it."""
        with self._lock:
            self._tickets[digest] = ticket

    def read_store(self, digest: str) -> None:
        """No peer has it; the store is being read."""
        with self._lock:
            self._tickets[digest] = ""

    def arrived(self, digest: str) -> None:
        """It is here, or was given up."""
        with self._lock:
            self._tickets.pop(digest, None)

    def coming(self, digest: str, ticket: str) -> bool:
        """Whether a peer with this ticket should wait for this replica to get it."""
        with self._lock:
            ours = self._tickets.get(digest)
        return ours is not None and ours < ticket


class PeerSegments:
    """Asks the peers of one update for segments. Not for use by several updates, nor after one."""

    def __init__(
        self, urls: Sequence[str], *, token: str, wanted: Wanted, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """`urls` are the peers' inference listeners, `token` is what they ask of each other."""
        self._wanted = wanted
        self._ticket = secrets.token_hex(8)
        self._interrupted = interrupted
        self._urls = list(urls)
        # Nothing may be encoded: a few bytes would decode into any number of them.
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT, trust_env=False)

    def fetch(self, segment: Segment, *, on_bytes: OnBytes) -> bytearray | None:
        """The segment's bytes, verified; None when no peer gave them, and the store is to be read."""
        self._wanted.ask_peers(segment.blake3, self._ticket)
        for url in list(self._urls):
            try:
                data = self._ask(url, segment)
            except (httpx.HTTPError, httpx.InvalidURL, _PeerFault) as error:
                log.warning("peer_dropped url=%s segment=%s error=%s", url, segment.blake3[:16], error or type(error))
                self._urls.remove(url)
                continue
            if data is not None:
                on_bytes(segment.size)
                return data
        self._wanted.read_store(segment.blake3)
        return None

    def arrived(self, segment: Segment) -> None:
        """The segment is in the spool now, or was given up."""
        self._wanted.arrived(segment.blake3)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, url: str, segment: Segment) -> bytearray | None:
        deadline = time.monotonic() + _PATIENCE_S
        address = f"{url.rstrip('/')}/v1/segments/{segment.blake3}"
        while not self._interrupted():
            with self._http.stream("GET", address, params={"ticket": self._ticket}) as answer:
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return None
                if answer.status_code == httpx.codes.OK:
                    return self._read(answer, segment, deadline=deadline)
                if answer.status_code != httpx.codes.ACCEPTED:
                    raise _PeerFault(f"HTTP {answer.status_code}")
            if time.monotonic() > deadline:
                raise _PeerFault("it did not get the segment in time")
        return None

    def _read(self, answer: httpx.Response, segment: Segment, *, deadline: float) -> bytearray:
        data = bytearray()
        for chunk in answer.iter_raw():
            data += chunk
            if len(data) > segment.size or time.monotonic() > deadline:
                raise _PeerFault("it sent more than the segment, or too slowly")
            if self._interrupted():
                raise Interrupted
        if len(data) != segment.size or blake3(data).hexdigest() != segment.blake3:
            raise _PeerFault("what it sent is not the segment")
        return data


class _PeerFault(Exception):
    """A peer that answers what it should not."""
