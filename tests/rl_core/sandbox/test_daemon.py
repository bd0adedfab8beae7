"""The service: bad requests, a full queue, a second start, a kill; and the refusal to run without its layers."""

import asyncio
import os
import signal
import socket
import subprocess

import httpx
import pytest

from rl_core.errors import SpecError, WorldError
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import RunLimits
from tests.rl_core.sandbox.test_limits import leftovers, settled
from tests.rl_core.sandbox_process import REFUSED, ROOT, running_sandboxd, sandboxd_command


async def test_health_names_the_layers(sandbox):
    health = await sandbox.health()
    assert health["slots"] == 3
    assert {"cgroup", "namespaces", "seccomp"} <= {layer for layer, present in health["layers"].items() if present}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["x"], "files": {"../x": b""}}, "relative path"),
        ({"argv": ["x"], "files": {"/x": b""}}, "relative path"),
        ({"argv": ["x"], "files": {"out/x": b""}}, "relative path"),
        ({"argv": ["x"], "files": {f"f{n}": b"" for n in range(300)}}, "at most 256"),
        ({"argv": ["x"], "files": {"x": b"x" * 20_000_000}}, "do not fit"),
        ({"argv": ["x"], "code": "y"}, "either"),
        ({}, "either"),
    ],
)
async def test_requests_that_are_refused(sandbox, request_, message):
    with pytest.raises(SpecError, match=message):
        await sandbox.run(**request_)


def test_limits_have_bounds():
    for change in ({"wall_s": 0}, {"memory_bytes": 1}, {"pids": 10**6}, {"output_bytes": -1}):
        with pytest.raises(SpecError, match=next(iter(change))):
            RunLimits(**change)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"x" * 100, b"\x81\xa4argv\x01"])
async def test_bodies_that_are_no_request(sandboxd, body):
    transport = httpx.AsyncHTTPTransport(uds=str(sandboxd.socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://sandboxd") as client:
        response = await client.post("/v1/run", content=body)
        assert response.status_code == 400
        assert response.json()["code"] == "spec_invalid"


async def test_the_queue_is_bounded(tmp_path):
    with running_sandboxd(tmp_path, "--slots", "1", "--max-queued", "2") as daemon:
        runs = [daemon.client.run(code="import time; time.sleep(1)") for _ in range(8)]
        results = await asyncio.gather(*runs, return_exceptions=True)
    busy = [result for result in results if isinstance(result, WorldError)]
    assert 1 <= len(busy) <= 6
    assert all("429" in str(error) for error in busy)
    assert all(result.exit_code == 0 for result in results if not isinstance(result, WorldError))


async def test_no_daemon_is_said_with_the_command(tmp_path):
    with pytest.raises(WorldError, match="python -m rl_core"):
        await SandboxClient(tmp_path / "none.sock").run(code="1")


def test_the_synchronous_client(sandboxd):
    assert sandboxd.client.run_sync(code="print(6 * 7)").stdout == b"42\n"


def start_again(folder, *, expect):
    done = subprocess.run(sandboxd_command(folder), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == expect
    return done.stderr


def test_a_second_start_on_the_same_socket_is_refused(sandboxd):
    assert "another sandboxd answers" in start_again(sandboxd.socket.parent, expect=REFUSED)
    assert sandboxd.client.run_sync(code="print(1)").stdout == b"1\n"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    assert "choose a shorter one" in start_again(tmp_path / ("x" * 120), expect=REFUSED)


async def test_the_socket_is_private(sandboxd):
    assert sandboxd.socket.stat().st_mode & 0o007 == 0


@pytest.mark.full
async def test_killing_the_daemon_ends_its_runs_and_a_new_one_starts_clean(tmp_path):
    with running_sandboxd(tmp_path) as daemon:
        run = asyncio.create_task(daemon.client.run(code="import time; time.sleep(50)", limits=RunLimits(wall_s=60.0)))
        while (await daemon.client.health())["running"] != 1 or not leftovers(daemon):
            await asyncio.sleep(0.05)
        daemon.process.send_signal(signal.SIGKILL)
        with pytest.raises(WorldError):
            await run
    with running_sandboxd(tmp_path) as successor:
        assert (await successor.client.run(code="print(1)")).stdout == b"1\n"
    assert await settled(daemon, successor) == []


async def test_it_stops_cleanly(tmp_path):
    with running_sandboxd(tmp_path) as daemon:
        daemon.process.terminate()
        assert await asyncio.to_thread(daemon.process.wait, 30) == 0
    assert not daemon.socket.exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/sys/fs/cgroup", os.W_OK), reason="sandboxd may well be refused here"
)
def test_check_prints_every_layer(tmp_path):
    command = sandboxd_command(tmp_path, "--check")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        "environment", "cgroup", "rlimits", "own_user", "no_new_privs", "namespaces", "seccomp", "landlock",
    ]  # fmt: skip


def test_a_stale_socket_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s.sock"))
    with running_sandboxd(tmp_path) as daemon:
        assert daemon.client.run_sync(code="print(1)").stdout == b"1\n"
