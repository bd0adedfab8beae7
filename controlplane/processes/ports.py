"""Loopback ports: which are free, and a choice that stays free."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable

from controlplane.processes.errors import PortTaken

LOOPBACK = "127.0.0.1"
# Below the range from which the kernel takes the local ports of outgoing connections (32768 and up on Linux): a port
# chosen here is still free when its server comes back after a crash.
_RANGE = range(20000, 32000)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the loopback port now (as servers do, with SO_REUSEADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(*, candidates: Iterable[int] | None = None, taken: Collection[int] = ()) -> int:
    """The first free port of `candidates` (by default a random one below the ephemeral range) that is not in `taken`.

    Raises: PortTaken.
    """
    tried = candidates if candidates is not None else random.sample(_RANGE, 200)
    for port in tried:
        if port not in taken and port_is_free(port):
            return port
    raise PortTaken("no free loopback port was found; end programs that hold ports and try again")
