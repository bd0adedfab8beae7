"""The lane's demonstration as a newcomer runs it, whole: its cycles, its sabotage, its summary, its exit codes."""

import re
import socket

import pytest
from machine_rig import Machine

from controlplane.processes.ports import free_port

pytestmark = [pytest.mark.drill, pytest.mark.timeout(5400)]


@pytest.fixture
def machine(tmp_path):
    prepared = Machine(tmp_path / "state", port=free_port())
    yield prepared
    prepared.close()


def test_the_lane_from_start_to_summary(machine):
    done = machine.manage("demo_lane", "--exit", "--port", str(machine.port), timeout_s=5000)
    text = done.stdout
    assert done.returncode in (0, 1), text + done.stderr
    assert text.count("plan: ") == 1
    for line in (
        r"plan: .*SIMULATED users \(seed 0\)",
        rf"open    http://localhost:{machine.port}/lanes/[0-9a-f-]+/",
        r"cycle 1\n  people    \d+ replies, \d+% of the incumbent's truly satisfied\n  window    \d+ of \d+ replies",
        r"gate      (pass|fail|inconclusive): candidate − incumbent [+-]\d\.\d+ \[",
        r"canary    pass at 50% of users: thumbs [+-]",
        r"end       promoted",
        r"SABOTAGED: thumbs up count as bad",
        r"style      held-out people .*difference [+-]\d",
        r"truth      key word .*difference [+-]\d",
        r"people     all SIMULATED",
        r"forger     (\d+) events sent, \1 refused",
        r"sabotage   cycle \d+: ",
        r"verdict    ",
    ):
        assert re.search(line, text), f"no line like {line!r} in:\n{text}"
    assert (done.returncode == 0) == ("verdict    shown" in text)
    assert machine.manage("services", "status").returncode == 3, "the services should have ended with it"


def test_a_port_in_use_is_a_fault(machine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = machine.manage("demo_lane", "--port", port)
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
