"""Services of a world, from inside: started before the command, awaited, and stopped after it in reverse."""

from __future__ import annotations

import os
import stat
import time

from rl_core.sandbox.inside import command

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import Any

_POLL_S = 0.005
_LOG_CHARS = 2000


def start_all(wanted: list[dict[str, Any]], cwd: str, *, confine: bool) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """Start each service once the one before it is ready. Returns those that run, and what is wrong."""
    running: list[tuple[int, dict[str, Any]]] = []
    for number, service in enumerate(wanted):
        log = f"/work/tmp/service-{number}.log"
        pid = _start(service["argv"], cwd, log, confine=confine)
        running.append((pid, service))
        if problem := _wait_until_ready(service, pid, cwd, confine=confine):
            return running, f"{service['argv'][0]} {problem}: {_end_of(log)}"
    return running, ""


def stop_all(running: list[tuple[int, dict[str, Any]]]) -> None:
    """Send each its signal, last first, and give it its time."""
    for pid, service in reversed(running):
        try:
            os.kill(pid, service["stop_signal"])
        except ProcessLookupError:
            continue
        deadline = time.monotonic() + service["stop_s"]
        while not _ended(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _start(argv: list[str], cwd: str, log: str, *, confine: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard, source in ((0, os.open("/dev/null", os.O_RDONLY)), (1, target), (2, target)):
        os.dup2(source, standard)
    command.confined(None, confine=confine)
    os.chdir(cwd)
    return command.execute(argv)


def _wait_until_ready(service: dict[str, Any], pid: int, cwd: str, *, confine: bool) -> str:
    deadline = time.monotonic() + service["ready_s"]
    while not _ready(service, cwd, confine=confine):
        if _ended(pid):
            return "ended before it was ready"
        if time.monotonic() > deadline:
            return f"was not ready within {service['ready_s']} s"
        time.sleep(_POLL_S)
    return ""


def _ready(service: dict[str, Any], cwd: str, *, confine: bool) -> bool:
    if service["ready"]:
        check = _start(service["ready"], cwd, "/dev/null", confine=confine)
        return os.waitpid(check, 0)[1] == 0
    try:
        mode = os.stat(os.path.join(cwd, service["ready_path"])).st_mode
    except OSError:
        return False
    return stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end_of(log: str) -> str:
    """The last words of a log, printable."""
    with open(log, "rb") as file:
        text = file.read()[-_LOG_CHARS:].decode(errors="replace")
    return "".join(char if char.isprintable() else " " for char in text).strip()
