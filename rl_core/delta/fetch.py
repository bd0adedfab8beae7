"""Getting segments: from the spool, from a peer, from the store, whoever has one first. Every byte is verified.

One segment is on its way at a time, in parts that are read side by side: a replica that is killed has at most that one
to fetch again, and memory holds at most two, the one that arrives and the one that is decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from blake3 import blake3

from rl_core.delta.manifest import Segment
from rl_core.delta.spool import Spool
from rl_core.errors import DigestMismatch, Interrupted
from rl_core.memory import mapped
from rl_core.store import ObjectStore

PART_BYTES: Final = 2 << 20
CONNECTIONS: Final = 4
_LEAST_PART_BYTES: Final = 64 << 10
_ASKED_EVERY_S: Final = 0.1
_PARTS_PER_S: Final = 8  # under a limit, parts are so small that this many fit into a second

OnBytes = Callable[[int], None]


class Origin(StrEnum):
    """Where a segment came from."""

    SPOOL = "spool"
    PEER = "peer"
    STORE = "store"


class Peers(Protocol):
    """Replicas that may have a segment."""

    def fetch(self, segment: Segment, *, on_bytes: OnBytes) -> bytearray | None:
        """The segment's bytes, verified; None when no peer gave them."""
        ...

    def arrived(self, segment: Segment) -> None:
        """The segment is in the spool now, or was given up."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified segment. `seconds` is how long it took, in the update or ahead of it.

    `resident`: it lies in memory, not in the spool's files.
    """

    number: int
    data: memoryview
    origin: Origin
    seconds: float
    resident: bool


class RateLimit:
    """A link of so many bytes a second: whoever takes some waits until the link could have carried them."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int, *, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until `count` bytes more have fitted through. Raises: Interrupted."""
        with self._lock:
            self._free_at = free_at = max(self._free_at, time.monotonic()) + count / self._rate
        while True:
            if interrupted():
                raise Interrupted
            wait_s = free_at - time.monotonic()
            if wait_s <= 0:
                return
            time.sleep(min(wait_s, _ASKED_EVERY_S))


class Ahead(Protocol):
    """Brings segments into the spool before they are asked for."""

    def held(self) -> AbstractContextManager[None]:
        """Nothing is brought while an update reads."""
        ...

    def take(self, digest: str) -> tuple[Origin, float] | None:
        """An update wants the segment: whence it was brought and how long that took; None when it was not brought."""
        ...


class SegmentSource:
    """Where the segments of one update come from. `limit_bytes_s` bounds what is read from the store a second.

    `interrupted` is asked before each part: once it is true, whoever reads meets `Interrupted`.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        spool: Spool | None = None,
        peers: Peers | None = None,
        ahead: Ahead | None = None,
        limit_bytes_s: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._interrupted = interrupted
        self._spool = spool
        self._peers = peers
        self._ahead = ahead
        self._limit = RateLimit(limit_bytes_s) if limit_bytes_s else None
        self._part_bytes = PART_BYTES
        if limit_bytes_s:
            self._part_bytes = int(min(PART_BYTES, max(_LEAST_PART_BYTES, limit_bytes_s / _PARTS_PER_S)))

    def brought(self, segment: Segment) -> tuple[Origin, float]:
        """Whence a segment came that an update has without fetching it, and how long that took."""
        return (self._ahead.take(segment.blake3) if self._ahead is not None else None) or (Origin.SPOOL, 0.0)

    def stream(self, segments: Sequence[Segment], *, on_bytes: OnBytes, first: int = 0) -> Iterator[Fetched]:
        """The segments from `first` on, each fetched while the one before it is worked on. Raises: as `fetch`."""
        if not segments[first:]:
            return
        with (
            self._ahead.held() if self._ahead is not None else nullcontext(),
            ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool,
            ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="part") as parts,
        ):
            coming = pool.submit(self.fetch, first, segments[first], on_bytes=on_bytes, parts=parts)
            for number in range(first + 1, len(segments) + 1):
                fetched = coming.result()
                if number < len(segments):
                    coming = pool.submit(self.fetch, number, segments[number], on_bytes=on_bytes, parts=parts)
                yield fetched
                del fetched  # or it would be held while the one after the next arrives

    def fetch(self, number: int, segment: Segment, *, on_bytes: OnBytes, parts: Executor) -> Fetched:
        """One segment, verified, its parts read on `parts`. `on_bytes` counts what arrives, on any thread.

        Raises: DigestMismatch (the store's bytes are not those of the manifest), ObjectMissing, StoreUnavailable,
        Interrupted.
        """
        started = time.perf_counter()
        brought = self._ahead.take(segment.blake3) if self._ahead is not None else None
        if self._spool is not None and (spooled := self._spool.get(segment)) is not None:
            on_bytes(segment.size)
            origin, seconds = brought or (Origin.SPOOL, time.perf_counter() - started)
            return Fetched(number, spooled, origin, seconds, resident=False)
        data: bytearray | memoryview | None = None
        origin = Origin.PEER
        try:
            if self._peers is not None:
                data = self._peers.fetch(segment, on_bytes=on_bytes)
            if data is None:
                data, origin = self._from_store(segment, on_bytes=on_bytes, parts=parts), Origin.STORE
            spooled = None
            if self._spool is not None and self._spool.put(segment, data):
                spooled = self._spool.get(segment)
        finally:
            if self._peers is not None:
                self._peers.arrived(segment)
        view = memoryview(data) if spooled is None else spooled
        return Fetched(number, view, origin, time.perf_counter() - started, resident=spooled is None)

    def _from_store(self, segment: Segment, *, on_bytes: OnBytes, parts: Executor) -> memoryview:
        data = mapped(segment.size)
        part_bytes = min(self._part_bytes, max(_LEAST_PART_BYTES, -(-segment.size // CONNECTIONS)))

        def read(start: int) -> None:
            length = min(part_bytes, segment.size - start)
            if self._limit is not None:
                self._limit.take(length, interrupted=self._interrupted)
            elif self._interrupted():
                raise Interrupted
            data[start : start + length] = self._store.get_range(
                segment.key, start=start, length=length, of=segment.size
            )
            on_bytes(length)

        reading = [parts.submit(read, start) for start in range(0, segment.size, part_bytes)]
        try:
            for part in reading:
                part.result()
        finally:  # after a failure nothing of it may go on beside what is read next
            for part in reading:
                part.cancel()
            wait(reading)
        if blake3(data).hexdigest() != segment.blake3:
            raise DigestMismatch(f"{segment.key} is not what its manifest says; fetch it again or restore it")
        return data
