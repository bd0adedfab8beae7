"""A real engine server process for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import engine_factories as make

from rl_core.engines.control_client import ControlClient
from rl_core.errors import EngineUnreachable

INFERENCE_TOKEN, CONTROL_TOKEN = "inference-secret", "control-secret"
PROGRAM = ("-m", "rl_core.engines")


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    url: str
    control_url: str

    def control(self) -> ControlClient:
        return ControlClient(self.control_url, CONTROL_TOKEN)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def command(
    folder: Path, state: Path, *, port: int, control_port: int, program: tuple[str, ...] = PROGRAM, **flags: object
) -> list[str]:
    state.mkdir(exist_ok=True)
    for name, token in (("inference", INFERENCE_TOKEN), ("control", CONTROL_TOKEN)):
        (state / f"{name}.token").write_text(token + "\n")
    arguments = {
        "model": folder, "name": "tiny", "port": port, "control-port": control_port,
        "store": (state / "store").as_uri(), "inference-token-file": state / "inference.token",
        "control-token-file": state / "control.token", "max-len": 512, "max-seqs": 8, **flags,
    }  # fmt: skip
    pairs = [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    return [sys.executable, *program, *pairs]


@contextlib.contextmanager
def running_engine(
    folder: Path, state: Path, *, program: tuple[str, ...] = PROGRAM, **flags: object
) -> Iterator[EngineProcess]:
    """An engine that answers. `program` is what Python runs: another one is the engine with something changed."""
    port, control_port = free_ports(2)
    arguments = command(folder, state, port=port, control_port=control_port, program=program, **flags)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    engine = EngineProcess(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control_port}")

    def healthy() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        with engine.control() as control, contextlib.suppress(EngineUnreachable):
            return control.health()["status"] == "ok"
        return False

    try:
        make.wait_until(healthy, timeout_s=60)
        yield engine
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
