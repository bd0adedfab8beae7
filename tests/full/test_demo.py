"""The demonstration as a newcomer runs it, cut short: its plan, its lines, its summary, its exit codes."""

import re
import socket

import pytest
from machine_rig import Machine

from controlplane.processes.ports import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture
def machine(tmp_path):
    prepared = Machine(tmp_path / "state", port=free_port())
    yield prepared
    prepared.close()


def test_the_demonstration_from_start_to_summary(machine):
    done = machine.manage("demo", "--exit", "--steps", "2", "--port", str(machine.port), timeout_s=1100)
    text = done.stdout
    assert done.returncode in (0, 1), text + done.stderr
    assert text.count("plan: ") == 1
    for line in (
        r"plan: .*train 2 steps of word-problems \(seed 0\)",
        rf"open    http://localhost:{machine.port}/runs/[0-9a-f-]+/",
        r"log in  engineer / \S+",
        r"log in  reviewer / \S+",
        r"step   1/2  reward \d\.\d\d",
        r"step   2/2  reward \d\.\d\d",
        r"reward     first 1 → last 1 steps: .*difference [+-]\d",
        r"held-out   before → after: .*difference [+-]\d",
        r"rollout-east +\d+ versions, .* MB instead of .* times less\), pauses \d+ ms median",
        r"rollout-west +\d+ versions",
        r"weights    every replica's root equals the trainer's",
        r"verdict ",
    ):
        assert re.search(line, text), f"no line like {line!r} in:\n{text}"
    assert (done.returncode == 0) == ("it learned" in text)
    assert machine.manage("services", "status").returncode == 3, "the services should have ended with it"
    assert not machine.web_answers()


def test_faults_are_said_with_exit_code_2(machine):
    folder = machine.state / "no-model"
    folder.mkdir()
    done = machine.manage("demo", "--exit", "--model", str(folder))
    assert done.returncode == 2
    assert "no model folder" in done.stderr
    assert machine.manage("demo", "--steps", "0").returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for command in ("demo", "up"):
            done = machine.manage(command, "--port", port)
            assert done.returncode == (2 if command == "demo" else 1)
            assert f"port {port} is in use" in done.stderr
