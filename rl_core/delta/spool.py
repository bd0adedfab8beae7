"""Segments on the local disk, named by their digest: what a killed replica goes on from, and what its peers take.

A cache, never a truth: what is read from it is checked against its digest, and a disk that takes no more costs a
warning and a second download.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from rl_core.delta.manifest import Segment
from rl_core.errors import StoreUnavailable

SPOOL_BYTES: Final = 8 << 30
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PARTIAL: Final = ".part-"

log = logging.getLogger(__name__)


class Spool:
    """A folder of segments of at most `max_bytes`; those not used for longest go first. One process to a folder.

    Safe to share between threads.
    """

    def __init__(self, folder: Path, *, max_bytes: int = SPOOL_BYTES) -> None:
        """Raises: StoreUnavailable when the folder cannot be made."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(f"{_PARTIAL}*"):
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot use the spool folder {folder}: {error}; name another one") from error

    def get(self, segment: Segment) -> memoryview | None:
        """The segment's bytes, mapped and verified; None when they are not here. What is damaged is removed."""
        path = self._folder / segment.blake3
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):  # no such file, or an empty one
            return None
        if data.nbytes == segment.size and blake3(data).hexdigest() == segment.blake3:
            with suppress(OSError):
                os.utime(path)
            return data
        log.warning("spool_damaged segment=%s", segment.blake3)
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, segment: Segment, data: bytes | bytearray | memoryview) -> bool:
        """Keep verified bytes; False when the disk does not take them, or they are more than may be kept."""
        if segment.size > self._max_bytes:
            return False
        partial = self._folder / f"{_PARTIAL}{uuid.uuid4().hex}"
        try:
            with self._lock:
                self._make_room(segment.size)
                partial.write_bytes(data)
                partial.rename(self._folder / segment.blake3)
        except OSError as error:
            log.warning("spool_full folder=%s error=%s", self._folder, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True

    @property
    def max_bytes(self) -> int:
        """How much it may hold."""
        return self._max_bytes

    def discard(self, digest: str) -> None:
        """Keep a segment no longer."""
        with suppress(OSError):
            (self._folder / digest).unlink()

    def path(self, digest: str) -> Path | None:
        """The file of a segment, unverified, for a peer that verifies; None when there is none."""
        path = self._folder / digest
        try:
            return path if _DIGEST.fullmatch(digest) and path.is_file() else None
        except OSError:  # a disk that does not answer has nothing
            return None

    def _make_room(self, size: int) -> None:
        kept = sorted(
            ((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder)),
            reverse=True,
        )
        left = self._max_bytes - size
        for _, held, path in kept:
            left -= held
            if left < 0:
                Path(path).unlink(missing_ok=True)
