"""Things of the host's that attacks would like to reach, and what answers for them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

FOREIGN_UID = 54_322
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Host:
    """Things of the host's that an attack would like to reach."""

    folder: Path
    uid: int | None
    values: dict[str, object]
    victim: subprocess.Popen | None = None

    def start_victim(self) -> None:
        """A process of the slot's user, which a run without its namespaces may have killed."""
        if self.victim is None or self.victim.poll() is not None:
            self.victim = subprocess.Popen(["sleep", "600"], user=self.uid, start_new_session=True)
            self.values["victim"] = self.victim.pid

    def end_victim(self) -> None:
        """Leave nothing behind."""
        if self.victim:
            self.victim.kill()
            self.victim.wait()

    def filled(self, code: str) -> str:
        """The attack, with the names of these things."""
        return re.sub(
            r"\{(" + "|".join(self.values) + r")(!r)?\}",
            lambda found: repr(self.values[found[1]]) if found[2] else str(self.values[found[1]]),
            code,
        )

    def binds(self) -> list[tuple[Path, str]]:
        """Files that are shown in every world."""
        return [(self.folder / name, f"/usr/{name}") for name in ("private", "foreign", "shared")]


@contextlib.contextmanager
def host(uid: int | None) -> Iterator[Host]:
    """Start listeners, a process of the slot's user, a queue of messages, and make files."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name, mode in {"private": 0o600, "foreign": 0o600, "shared": 0o666, "open": 0o644}.items():
        (folder / name).write_text("the host's")
        (folder / name).chmod(mode)
    if uid is not None:
        os.chown(folder / "foreign", FOREIGN_UID, FOREIGN_UID)
    abstract, key = f"\0slipway-control-{os.getpid()}", 0x51000000 + os.getpid()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        queue = _libc.msgget(key, 0o1666)
        stack.callback(_libc.msgctl, queue, 0, None)
        port = listening(stack, socket.create_server(("127.0.0.1", 0)))
        udp = listening(stack, datagram_socket())
        listening(stack, abstract_socket(abstract))
        values = {"port": port, "udp": udp, "abstract": abstract, "queue": key, "path": str(folder / "open")}
        things = Host(folder, uid, values | {"node": os.uname().nodename})
        stack.callback(things.end_victim)
        yield things


def datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


def abstract_socket(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(name)
    made.listen()
    return made


def listening(stack: contextlib.ExitStack, listener: socket.socket) -> int:
    """Answer everybody in a thread. Returns the port."""
    threading.Thread(target=answer, args=(listener,), daemon=True).start()
    stack.callback(listener.close)
    return listener.getsockname()[1] if listener.family == socket.AF_INET else 0


def answer(listener: socket.socket) -> None:
    while True:
        if listener.type == socket.SOCK_DGRAM:
            listener.sendto(b"secret", listener.recvfrom(16)[1])
        else:
            with listener.accept()[0] as connection:
                connection.send(b"secret")
