"""Packing payloads into segments, which go up in the background as they are filled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash
from blake3 import blake3

from rl_core.delta.codec import EncodedFrame
from rl_core.delta.manifest import Draft, Frame, Segment, StandingSegment, TensorRange, segment_key
from rl_core.errors import ObjectExists, ObjectMissing, StoreError
from rl_core.store import ObjectStore

OnSegment = Callable[[StandingSegment], None]


class SegmentWriter:
    """Packs payloads end to end; a full segment goes up in the background, one at a time.

    One at a time, so that a kill costs at most one that must be sent again.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        segment_bytes: int,
        attempts: str | None = None,
        on_segment: OnSegment | None = None,
        draft: Draft | None = None,
    ) -> None:
        """`on_segment` is told of each segment once it stands, in order, on the uploader's thread; of what `draft`.

        `attempts` is the folder of numbered ones of which `prefix` is one: what stands in others is not sent again.
        """
        self._store = store
        self._segment_bytes = segment_bytes
        self._on_segment = on_segment
        self._draft = draft
        self._prefix = prefix
        self._standing = {info.key: info.size_bytes for info in store.list(attempts or f"{prefix}/segments")}
        self._earlier = {name: key for key in self._standing if (name := _name_in(attempts, key)) is not None}
        self._payloads: list[bytes | memoryview] = []
        self._size = 0
        self._digest = blake3()
        self._frames: list[Frame] = []
        self._sent_bytes, self._sent_s = 0, 0.0
        self._pending: Future[None] | None = None
        self._segments: list[Segment] = []

    def append(self, ranges: list[TensorRange], encoded: EncodedFrame, *, uploader: ThreadPoolExecutor) -> Frame:
        """Take a payload; where it lies. Raises: as writing the segment before."""
        frame = Frame(
            ranges=ranges,
            mode=encoded.mode,
            segment=len(self._segments),
            offset=self._size,
            size=len(encoded.payload),
            xxh3=xxhash.xxh3_64_hexdigest(encoded.payload),
            changes=encoded.changes,
        )
        self._payloads.append(encoded.payload)
        self._size += len(encoded.payload)
        self._digest.update(encoded.payload)
        self._frames.append(frame)
        if self._size >= self._segment_bytes:
            self._close(uploader)
        return frame

    def _close(self, uploader: ThreadPoolExecutor) -> None:
        digest = self._digest.hexdigest()
        segment = Segment(segment_key(self._prefix, len(self._segments), digest=digest), self._size, digest)
        self._segments.append(segment)
        payloads, self._payloads, self._size, self._digest = self._payloads, [], 0, blake3()
        frames, self._frames = self._frames, []
        if self._pending is not None:
            self._pending.result()
        self._pending = uploader.submit(self._put, segment, payloads, frames)

    def _put(self, segment: Segment, payloads: list[bytes | memoryview], frames: list[Frame]) -> None:
        if not (self._adopted(segment) or self._copied(segment)):
            self._send(segment, payloads)
        if self._on_segment is not None:
            self._on_segment(StandingSegment(segment, frames, self._draft))

    def _send(self, segment: Segment, payloads: list[bytes | memoryview]) -> None:
        started = time.perf_counter()
        try:
            self._store.put(segment.key, payloads)
        except ObjectExists as error:
            if not (self._store.adopt(segment.key, segment.size) and self._holds(segment.key, segment)):
                raise ObjectExists(
                    f"{segment.key} holds other bytes than its name says; publish under a new fence"
                ) from error
            return
        self._sent_bytes += segment.size
        self._sent_s += time.perf_counter() - started

    def _adopted(self, segment: Segment) -> bool:
        """Whether this attempt, run before, has put it."""
        return self._standing.get(segment.key) == segment.size and self._store.adopt(segment.key, segment.size)

    def _copied(self, segment: Segment) -> bool:
        """Whether an earlier attempt has put the same, which then stands here, too. What it put is read once."""
        source = self._earlier.get(segment.key.rpartition("/")[2])
        if source is None or segment.key in self._standing:
            return False
        try:
            if not self._holds(source, segment):
                return False
            self._store.copy(source, segment.key)
            return self._store.adopt(segment.key, segment.size)
        except ObjectMissing:
            return False
        except StoreError:  # this kind of store copies nothing, or not now: it is not asked again
            self._earlier.clear()
            return False

    def _holds(self, key: str, segment: Segment) -> bool:
        """Whether what stands under the key are the segment's bytes."""
        return bool(blake3(self._store.get(key)).hexdigest() == segment.blake3)

    @property
    def upload_s(self) -> float:
        """How long sending all segments takes, by those that were sent; 0 where that is less than half of the bytes."""
        total = sum(one.size for one in self._segments)
        return self._sent_s * total / self._sent_bytes if 0 < total <= 2 * self._sent_bytes else 0.0

    def finish(self, *, uploader: ThreadPoolExecutor) -> list[Segment]:
        """Write what is left; all segments. Raises: ObjectExists, StoreUnavailable."""
        if self._payloads:
            self._close(uploader)
        if self._pending is not None:
            self._pending.result()
        return self._segments


def _name_in(attempts: str | None, key: str) -> str | None:
    """The name of a segment of an attempt in that folder."""
    match = attempts is not None and re.fullmatch(rf"{re.escape(attempts)}/\d+/segments/([^/]+)", key)
    return match[1] if match else None
