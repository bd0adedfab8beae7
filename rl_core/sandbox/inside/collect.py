"""Collecting what a run left, from inside: regular files alone, and one refusal voids the whole set."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from collections.abc import Iterator

OUT = "/work/out"
MAX_ARTIFACT_DEPTH, MAX_DEPTH = 8, 32


class Found:
    """A regular file: its path below the folder that was walked, and what its inode says."""

    __slots__ = ("changed_ns", "inode", "name", "path", "size")

    def __init__(self, name: str, path: str, status: os.stat_result) -> None:
        self.name, self.path = name, path
        self.size, self.inode, self.changed_ns = status.st_size, status.st_ino, status.st_ctime_ns


def walk(top: str, max_files: int, max_depth: int = MAX_DEPTH) -> Iterator[Found | str]:
    """Every file below a folder; a text says why the set is void, and ends it."""
    pending = [("", 0)]
    files = folders = 0
    while pending:
        folder, depth = pending.pop()
        with os.scandir(f"{top}/{folder}") as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                name = f"{folder}{entry.name}"
                if not entry.name.isprintable():
                    yield "a name with unprintable characters"
                    return
                if stat.S_ISDIR(status.st_mode):
                    folders += 1
                    refusal = f"folders deeper than {max_depth}" if depth >= max_depth else ""
                    if folders > max_files:
                        refusal = f"more than {max_files} folders"
                    pending.append((name + "/", depth + 1))
                else:
                    files += 1
                    refusal = refuse(entry.name, status)
                    if not refusal and files > max_files:
                        refusal = f"more than {max_files} files"
                    if not refusal and not os.access(entry.path, os.R_OK):
                        refusal = f"{entry.name} is unreadable"
                if refusal:
                    yield refusal
                    return
                if not stat.S_ISDIR(status.st_mode):
                    yield Found(name, entry.path, status)


def artifacts(max_files: int, max_bytes: int) -> tuple[list[Found], str]:
    """The files below /work/out, or why the whole set is void."""
    found: list[Found] = []
    total = 0
    for entry in walk(OUT, max_files, MAX_ARTIFACT_DEPTH):
        if isinstance(entry, str):
            return [], entry
        found.append(entry)
        total += entry.size
        if total > max_bytes:
            return [], f"more than {max_bytes} bytes"
    return found, ""


def refuse(name: str, status: os.stat_result) -> str:
    """Why a file is none to be collected; empty if it is one."""
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file"
    if status.st_nlink != 1:
        return f"{name} is a hard link"
    if status.st_blocks * 512 < status.st_size:
        return f"{name} is sparse"
    return ""


def send(target: int, files: list[Found]) -> None:
    """The files' contents, one after another."""
    for found in files:
        source = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        offset = 0
        while offset < found.size:
            offset += os.sendfile(target, source, offset, found.size - offset) or found.size
        os.close(source)
