"""Processes that benchmarks ask over HTTP: the web process as it is run, and others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import httpx


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as it is wanted. What it prints goes to stderr: stdout is for the result."""
    own = {**os.environ, **env}  # noqa: TID251  # the benchmark's own environment
    process = subprocess.Popen(command, env=own, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def web_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The web process over the benchmark's own database, once it answers."""
    from controlplane.processes.specs import web_spec

    with running(list(web_spec(port=port).argv), {"DATABASE_URL": database_url(), "LOG_LEVEL": "WARNING"}) as process:
        _wait(f"http://127.0.0.1:{port}/healthz")
        yield process


def database_url() -> str:
    """The address of the benchmark's own database."""
    from django.conf import settings
    from django.db import connection

    return urlunsplit(urlsplit(settings.DATABASE_URL)._replace(path=f"/{connection.settings_dict['NAME']}"))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).status_code < 500:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.1)
