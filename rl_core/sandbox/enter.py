"""Runs inside every sandbox, as its first program: places files, starts the command under Landlock, and collects.

Handed to the sandbox's Python as text, so it imports the standard library alone, and of that only what starts
at once: `json`, `base64`, `signal` or `contextlib` would take longer to import than all else here takes to run. It
shares a user with the code it starts: whatever it reports is data that sandboxd bounds and checks again, never trusts.

Arguments: the descriptor of the job (marshal, by the same Python outside) and of the report. The report is a line
`ready`, then a JSON line, then the artefacts' bytes one after another.
"""

from __future__ import annotations

import marshal
import os
import stat
import sys
import time

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import Any

WORK, OUT, TEMPORARY = "/work", "/work/out", "/work/tmp"
READ_ONLY = ("/python", "/usr", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
MAX_DEPTH = 8
SIGKILL = 9

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _EVERYTHING_V1 = 0b1101, (1 << 13) - 1  # execute, read file, read directory / all of ABI 1
_DEVICE_NODES = 1 << 6 | 1 << 11


def landlock() -> int:
    """Confine this process to its files, no TCP, no abstract sockets or signals to the outside. Returns the ABI."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    abi = int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    if abi < 1:
        return 0
    handled = (
        _EVERYTHING_V1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    )
    attributes = [handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0]
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = (ctypes.c_uint64 * 3)(*attributes)
    descriptor = int(libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(size), 0))
    rules = [(path, _READ) for path in READ_ONLY] + [(path, 0b110) for path in DEVICES]
    for path, access in [*rules, (WORK, handled & ~_DEVICE_NODES)]:
        try:
            parent = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        rule = access.to_bytes(8, "little") + parent.to_bytes(4, "little")
        libc.syscall(_ADD_RULE, descriptor, 1, rule, 0)
        os.close(parent)
    restricted = int(libc.syscall(_RESTRICT_SELF, descriptor, 0))
    os.close(descriptor)
    return abi if restricted == 0 else 0


def start(job: dict[str, Any]) -> int:
    """Fork the command; the child keeps nothing but its standard streams."""
    pid = os.fork()
    if pid:
        return pid
    os.closerange(3, 256)
    if job["landlock"] and not landlock():
        os._exit(126)
    argv = job["argv"]
    program = "/python/bin/python3" if argv[0] == "python3" else argv[0]
    environment = {"PATH": "/python/bin", "HOME": WORK, "TMPDIR": TEMPORARY, "LANG": "C.UTF-8"}
    environment["LD_LIBRARY_PATH"] = "/python/lib"
    try:
        os.execve(program, argv, environment)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def kill_the_rest() -> None:
    """Kill whoever the command left behind, so that nobody touches what is being collected."""
    for _ in range(2000):
        try:
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.001)


def collect(max_files: int, max_bytes: int) -> tuple[list[tuple[str, bytes]], str]:
    """Regular files below /work/out, or why the whole set is void: one refusal voids it."""
    found: list[tuple[str, bytes]] = []
    total = 0
    pending = [(OUT, 0)]
    while pending:
        folder, depth = pending.pop()
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            if not entry.name.isprintable():
                return [], "a name with unprintable characters"
            if stat.S_ISDIR(status.st_mode):
                if depth >= MAX_DEPTH:
                    return [], f"folders deeper than {MAX_DEPTH}"
                pending.append((entry.path, depth + 1))
                if len(pending) > max_files:
                    return [], f"more than {max_files} folders"
                continue
            total += status.st_size
            refusal = refuse(entry.name, status)
            if not refusal and len(found) >= max_files:
                refusal = f"more than {max_files} files"
            if not refusal and total > max_bytes:
                refusal = f"more than {max_bytes} bytes"
            if refusal:
                return [], refusal
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                found.append((os.path.relpath(entry.path, OUT), file.read(status.st_size)))
    return found, ""


def refuse(name: str, status: os.stat_result) -> str:
    """Why a file is no artefact; empty if it is one."""
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file"
    if status.st_nlink != 1:
        return f"{name} is a hard link"
    if status.st_blocks * 512 < status.st_size:
        return f"{name} is sparse"
    return ""


def report_line(status: int, sizes: list[tuple[str, int]], refused: str) -> str:
    """The report's header as JSON. All texts in it are printable."""
    artifacts = ", ".join(f"[{quoted(name)}, {size}]" for name, size in sizes)
    return f'{{"status": {status}, "artifacts": [{artifacts}], "refused": {quoted(refused)}}}\n'


def quoted(text: str) -> str:
    """A printable text as JSON."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def main(job_fd: int, report_fd: int) -> None:
    """Run one job, and end without the interpreter's own tidying."""
    os.write(report_fd, b"ready\n")
    with open(job_fd, "rb") as file:
        job = marshal.load(file)  # noqa: S302  # from sandboxd
    os.chdir(WORK)
    os.mkdir(OUT)
    os.mkdir(TEMPORARY)
    for name, content in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    _, status = os.waitpid(start(job), 0)
    kill_the_rest()
    try:
        artifacts, refused = collect(job["artifact_files"], job["artifact_bytes"])
    except (OSError, ValueError) as error:
        artifacts, refused = [], f"unreadable: {type(error).__name__}"
    sizes = [(name, len(content)) for name, content in artifacts]
    with os.fdopen(report_fd, "wb") as file:
        file.write(report_line(os.waitstatus_to_exitcode(status), sizes, refused).encode())
        for _, content in artifacts:
            file.write(content)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
