"""A real sandboxd for tests, started as its own process on a socket of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rl_core.sandbox.client import SandboxClient

ROOT = Path(__file__).parents[2]
REFUSED = 3


@dataclass
class Sandboxd:
    """A running sandboxd."""

    process: subprocess.Popen
    socket: Path
    client: SandboxClient


def sandboxd_command(folder: Path, *arguments: str) -> list[str]:
    socket, state = str(folder / "s.sock"), str(folder / "state")
    return [sys.executable, "-m", "rl_core.sandbox", "--socket", socket, "--state", state, *arguments]


@contextlib.contextmanager
def running_sandboxd(folder: Path, *arguments: str, secret: str = "") -> Iterator[Sandboxd]:
    """Start, wait until it answers, stop. Skips the test where this machine cannot run sandboxes."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SLIPWAY_SECRET": secret}
    with (folder / "log").open("w") as log:  # not a pipe: nobody reads it, and a full one stops the daemon
        process = subprocess.Popen(
            sandboxd_command(folder, *arguments), env=environment, cwd=folder, stderr=log, text=True
        )
    daemon = Sandboxd(process, folder / "s.sock", SandboxClient(folder / "s.sock"))
    try:
        wait_until_ready(daemon)
        yield daemon
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_ready(daemon: Sandboxd) -> None:
    deadline = time.monotonic() + 60
    while True:
        if daemon.process.poll() == REFUSED:
            pytest.skip(f"sandboxd refuses: {(daemon.socket.parent / 'log').read_text().strip()}")
        transport = httpx.HTTPTransport(uds=str(daemon.socket))
        try:
            with httpx.Client(transport=transport, base_url="http://sandboxd") as client:
                client.get("/v1/health").raise_for_status()
        except httpx.TransportError:
            if daemon.process.poll() not in (None, REFUSED) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
