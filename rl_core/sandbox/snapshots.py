"""Snapshots of file trees in sandboxd's state folder: named by content, read-only, bounded, the longest unused goes."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SpecError, WorldError
from rl_core.sandbox.protocol import SnapshotMissing
from rl_core.sandbox.trees import blob_id, read_index

_NAME = re.compile(r"[0-9a-f]{64}")
_LENGTH_BYTES = 16


class SnapshotsFull(WorldError):
    """Every snapshot that takes room is in use."""

    code = "sandbox_snapshots_full"
    retryable = True


@dataclass(frozen=True)
class Snapshot:
    """An open snapshot: its blob's descriptor, and where each file lies in it."""

    descriptor: int
    index: dict[str, tuple[int, int]]

    def read(self, name: str) -> bytes:
        """A file's content. Raises: KeyError."""
        offset, size = self.index[name]
        return os.pread(self.descriptor, size, offset)


class SnapshotStore:
    """Snapshots as files of a folder that belongs to this process alone. Threads may share it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._max_bytes = folder, max_bytes
        self._in_use: Counter[str] = Counter()
        self._known_good: set[str] = set()
        self._lock = threading.RLock()
        for torn in folder.glob("*.part"):
            torn.unlink()

    def has(self, name: str) -> bool:
        """Whether a snapshot is here; if so, this counts as a use."""
        try:
            with self.use(name):
                return True
        except SnapshotMissing:
            return False

    def freeze(self, blob: bytes) -> str:
        """Keep a blob and give its name. Raises: SpecError, SnapshotsFull, OSError."""
        read_index(blob, len(blob))
        name = blob_id(blob)
        with self._lock:
            if self.has(name):
                return name
            self._make_room(len(blob))
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                file.write(blob)
                os.fchmod(file.fileno(), 0o400)
            Path(file.name).rename(self._folder / name)
            self._known_good.add(name)
        return name

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Snapshot]:
        """Open a snapshot, which is not removed meanwhile. Raises: SnapshotMissing."""
        path = self._folder / name
        try:
            if not _NAME.fullmatch(name):
                raise FileNotFoundError(name)
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SnapshotMissing(f"no snapshot {name[:64]!r} is kept here; freeze its tree again") from error
        with self._lock:
            self._in_use[name] += 1
        try:
            os.utime(descriptor)  # its name may be gone by now
            yield Snapshot(descriptor, self._index(name, descriptor))
        finally:
            os.close(descriptor)
            with self._lock:
                self._in_use[name] -= 1

    def _index(self, name: str, descriptor: int) -> dict[str, tuple[int, int]]:
        size = os.fstat(descriptor).st_size
        try:
            if name not in self._known_good:
                if blob_id(os.pread(descriptor, size, 0)) != name:
                    raise SpecError("not what its name says")
                self._known_good.add(name)
            length = os.pread(descriptor, _LENGTH_BYTES, 0).partition(b"\n")[0]
            return read_index(os.pread(descriptor, len(length) + 1 + int(length), 0), size)
        except (SpecError, ValueError) as error:
            (self._folder / name).unlink()
            raise SnapshotMissing(f"the snapshot {name} was damaged and is removed; freeze its tree again") from error

    def _make_room(self, needed: int) -> None:
        """Remove what was used longest ago, but nothing in use. Raises: SnapshotsFull."""
        kept = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in self._folder.iterdir()]
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total + needed <= self._max_bytes:
                break
            if not self._in_use[path.name]:
                path.unlink()
                self._known_good.discard(path.name)
                total -= size
        if total + needed > self._max_bytes:
            raise SnapshotsFull(
                f"no room for a snapshot of {needed} bytes among {self._max_bytes}; raise --snapshot-bytes"
            )
