"""The tree at /work/repo, from inside: laid out of a snapshot and a layer, and compared with that after the run."""

from __future__ import annotations

import os

from rl_core.sandbox.inside.collect import Found, walk

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from collections.abc import Mapping

REPO = "/work/repo"
_PROGRAMS = (b"#!", b"\x7fELF")


class Tree:
    """What was laid out: each path with its inode, and a time before which nothing of the run's happened."""

    def __init__(self, base_fd: int | None, layer: Mapping[str, bytes | None]) -> None:
        """Write the tree. `base_fd` is the snapshot's blob (see `rl_core.sandbox.trees`), copied by the kernel."""
        self.inodes: dict[str, int] = {}
        self._folders: set[str] = set()
        os.mkdir(REPO)
        if base_fd is not None:
            for name, offset, size in _index(base_fd):
                if name not in layer:
                    self._copy(name, base_fd, offset, size)
        for name, content in layer.items():
            if content is not None:
                self._write(name, content)
        self.laid_out_ns = _now_ns()

    def changes(self, max_seen: int, max_files: int, max_bytes: int) -> tuple[list[Found], list[str], str]:
        """Files that are new or may differ, paths that are gone, and why what is there is no tree at all."""
        changed: list[Found] = []
        seen = set()
        total = 0
        for entry in walk(REPO, max_seen):
            if isinstance(entry, str):
                return [], [], entry
            seen.add(entry.name)
            if self.inodes.get(entry.name) == entry.inode and entry.changed_ns < self.laid_out_ns:
                continue
            changed.append(entry)
            total += entry.size
            if len(changed) > max_files:
                return [], [], f"more than {max_files} changed files"
            if total > max_bytes:
                return [], [], f"more than {max_bytes} changed bytes"
        gone = [name for name in self.inodes if name not in seen]
        if len(gone) > max_files:
            return [], [], f"more than {max_files} deleted files"
        return changed, gone, ""

    def _copy(self, name: str, base_fd: int, offset: int, size: int) -> None:
        mode = 0o755 if os.pread(base_fd, min(size, 4), offset).startswith(_PROGRAMS) else 0o644
        target = self._create(name, mode)
        while size:
            copied = os.sendfile(target, base_fd, offset, size)
            if not copied:
                raise OSError(f"the snapshot ends within {name}")
            offset, size = offset + copied, size - copied
        os.close(target)

    def _write(self, name: str, content: bytes) -> None:
        target = self._create(name, 0o755 if content.startswith(_PROGRAMS) else 0o644)
        view = memoryview(content)
        while view:
            view = view[os.write(target, view) :]
        os.close(target)

    def _create(self, name: str, mode: int) -> int:
        path = f"{REPO}/{name}"
        folder = path[: path.rindex("/")]
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        self.inodes[name] = os.fstat(descriptor).st_ino
        return descriptor


def _index(base_fd: int) -> list[tuple[str, int, int]]:
    """Path, offset and size of each file of a snapshot."""
    length, _, _ = os.pread(base_fd, 16, 0).partition(b"\n")
    start = len(length) + 1
    offset = start + int(length)
    index = []
    for line in os.pread(base_fd, int(length), start).decode().split("\n")[:-1]:
        size, _, name = line.partition(" ")
        index.append((name, offset, int(size)))
        offset += int(size)
    return index


def _now_ns() -> int:
    """The time of the clock that stamps files: only a file system can say it."""
    path = f"{REPO}.now"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    now = os.stat(path).st_ctime_ns
    os.unlink(path)
    return now
