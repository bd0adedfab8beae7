"""Records of started processes that survive us: which process it was, safe against the reuse of its number."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from controlplane.processes.errors import AlreadyRunning

_CLOCK_SLACK_S = 5.0


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process by number and time of birth (seconds since the epoch): the pair is never reused."""

    pid: int
    born: float


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a whole file or none, with its mode from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def record_write(path: Path, pid: int) -> None:
    """Remember a process that was just started."""
    write_atomically(path, msgspec.json.encode(ProcessRecord(pid, psutil.Process(pid).create_time())))


def record_read(path: Path, *, name: str) -> psutil.Process | None:
    """The recorded process if it still lives and is still the one that was started; else None."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return process_alive(record.pid, born=record.born, name=name)


def process_alive(pid: int, *, born: float, name: str) -> psutil.Process | None:
    """The process of that number, if it was born at that time, bears that name and is no zombie."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - born) < _CLOCK_SLACK_S and name in process.name()
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def process_gone(process: psutil.Process, *, timeout_s: float) -> bool:
    """Wait until the process has ended; a zombie, which its parent has yet to reap, has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def exclusive(path: Path, *, timeout_s: float, message: str) -> Iterator[None]:
    """Hold an advisory lock that the kernel drops when the holder dies.

    Raises: AlreadyRunning with `message` when another process holds it for longer than `timeout_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise AlreadyRunning(message) from None
                time.sleep(0.05)
        yield
