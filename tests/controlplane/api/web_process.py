"""The web process as it is run: uvicorn over the ASGI application, on a free port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from django.conf import settings


@contextmanager
def serving(database_url: str, *, log: Path) -> Iterator[str]:
    """Its URL, while it runs over that database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"],
            env={**os.environ, "DATABASE_URL": database_url, "REPLICA_NETWORKS": "10.1.0.0/16"},
            cwd=settings.BASE_DIR,
            stdout=output,
            stderr=output,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/healthz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the web process did not come up: {log.read_text()[-2000:]}")
