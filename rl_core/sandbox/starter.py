"""The process that starts sandboxes for sandboxd: small, so that a fork of it is cheap.

Each message on its socket is one start: a marshalled dict and the descriptors that the sandbox gets. The child joins
its cgroups first, so that nothing of it is ever outside, then takes its limits and its user, and becomes bubblewrap.
This process adopts what its children leave behind, and the kernel reaps all of them. It ends when sandboxd does, and
bubblewrap then ends with it (`--die-with-parent`).

Run as `python -I -S starter.py SOCKET_DESCRIPTOR`: it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import signal
import socket
import sys
from typing import Any

MAX_MESSAGE_BYTES = 128 * 1024
STANDARD, MAX_DESCRIPTORS = 3, 8
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_libc = ctypes.CDLL(None, use_errno=True)


def serve(requests: socket.socket) -> None:
    """Start what is asked for until the other side is gone."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whatever dies is reaped at once
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return
        try:
            if os.fork() == 0:
                become(marshal.loads(message), descriptors)  # noqa: S302  # from sandboxd
        except OSError as error:
            os.write(descriptors[2], f"cannot fork: {error.strerror}\n".encode())
        for descriptor in descriptors:
            os.close(descriptor)


def become(start: dict[str, Any], descriptors: list[int]) -> None:
    """In the child: put on the outer layers and become `start["argv"]`. Ends the process, with a reason on its stderr.

    The first three descriptors become the standard streams; the others get the numbers from 3 on, in their order.
    """
    try:
        place(descriptors)
        for path in start["cgroups"]:
            enter_cgroup(path)
        confine(start)
        os.execve(start["argv"][0], start["argv"], start["environment"])  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start: {error}\n".encode())
    os._exit(1)


def place(descriptors: list[int]) -> None:
    """Give descriptors the numbers from 0 on."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in descriptors]
    for at, descriptor in enumerate(above):
        os.dup2(descriptor, at, inheritable=True)
    os.closerange(len(descriptors), 256)


def enter_cgroup(path: str) -> None:
    """Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, b"0")
    os.close(descriptor)


def confine(start: dict[str, Any]) -> None:
    """rlimits, the slot's own user, no new privileges. Raises: OSError."""
    for kind, soft, hard in start["rlimits"]:
        resource.setrlimit(kind, (soft, hard))
    uid = start["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
