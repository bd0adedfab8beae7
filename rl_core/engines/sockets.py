"""Listening sockets, bound before anything slow is loaded. Imports no torch."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises: OSError (port in use), OverflowError (no such port)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(256)
    except (OSError, OverflowError):
        sock.close()
        raise
    return sock
