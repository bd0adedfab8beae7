"""The benchmark of the sandbox sees what runs leave, and says so."""

import asyncio
import contextlib
import os

import pytest

from benchmarks import sandbox as bench
from rl_core.errors import SandboxRefused
from rl_core.sandbox.client import SandboxClient
from rl_core.sandbox.protocol import RunLimits


@pytest.fixture(scope="module")
def daemon():
    with contextlib.ExitStack() as stack:
        try:
            process, socket = stack.enter_context(bench.sandboxd("--ahead", "0"))
        except SandboxRefused as error:
            pytest.skip(f"sandboxd refuses: {error}")
        yield process.pid, socket


def test_starts_and_a_burst_leave_nothing(daemon):
    pid, socket = daemon
    before = bench.Traces.of(pid)
    assert len(bench.ours(SandboxClient(socket), 4, 2)) == 4
    figures = asyncio.run(bench.burst(socket, 6, 3))
    assert figures["burst_worlds"] == 6
    assert figures["burst_client_max_vs_median"] >= 1
    assert 0 < figures["burst_late_share"] <= 1
    left = bench.leftovers(pid, before, 11)
    assert {name: count for name, count in left.items() if name != "left_descriptors"} == {
        "left_processes": 0,
        "left_zombies": 0,
        "left_cgroups": 0,
        "left_mounts": 0,
        "leftovers": 0,
    }


def test_a_block_from_the_pool_has_a_start_for_each_world_that_waits(monkeypatch):
    monkeypatch.setattr(bench, "AHEAD", 3)
    assert len(bench.from_pool(2)) == 6


async def test_what_is_still_there_fails_the_benchmark(daemon, monkeypatch):
    pid, socket = daemon
    before = bench.Traces.of(pid)
    monkeypatch.setattr(bench, "_SETTLE_S", 0.2)
    sleeping = "import time; time.sleep(3); print(7)"
    run = asyncio.create_task(SandboxClient(socket).run(code=sleeping, limits=RunLimits(wall_s=30.0)))
    while bench.Traces.of(pid).processes == before.processes:
        await asyncio.sleep(0.02)
    with pytest.raises(RuntimeError, match=r"'left_processes': [1-9].*'left_cgroups': [1-9]"):
        await asyncio.to_thread(bench.leftovers, pid, before, 1)
    assert (await run).stdout == b"7\n"


async def test_an_answer_that_is_wrong_fails_the_benchmark(daemon, monkeypatch):
    monkeypatch.setattr(bench, "_ANSWER", b"43\n")
    with pytest.raises(RuntimeError, match="ended with ok"):
        await asyncio.to_thread(bench.ours, SandboxClient(daemon[1]), 1, 1)


def test_a_peer_answers_the_same():
    assert len(bench.peer(bench._bare(), 2)) == 2


def test_descriptors_of_the_daemon_are_counted():
    own = bench.Traces.of(os.getpid())
    descriptor = os.open("/dev/null", os.O_RDONLY)
    try:
        assert bench.Traces.of(os.getpid()).since(own)["left_descriptors"] == 1
    finally:
        os.close(descriptor)
