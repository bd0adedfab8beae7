"""Worlds started ahead: each runs one job, and is held as well as one that is started when it is asked for."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rl_core.sandbox.protocol import MIB, RunLimits
from tests.rl_core.sandbox.attacks import CONTAINED, attack
from tests.rl_core.sandbox.test_limits import settled
from tests.rl_core.sandbox_process import running_sandboxd

MARK = "import os\nprint(os.path.exists('/work/tmp/mark'))\nopen('/work/tmp/mark', 'w').close()"


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    with running_sandboxd(tmp_path_factory.mktemp("pooled"), "--slots", "2", "--ahead", "4") as daemon:
        yield daemon


async def filled(daemon, ahead=4):
    """The daemon's health, once so many worlds wait."""
    deadline = time.monotonic() + 60
    while (health := await daemon.client.health())["ahead"] != ahead:
        assert time.monotonic() < deadline, health
        await asyncio.sleep(0.02)
    return health


async def test_a_waiting_world_is_used_once_and_another_takes_its_place(pooled):
    before = await filled(pooled)
    results = [await pooled.client.run(code=MARK) for _ in range(4)]
    results += await asyncio.gather(*(pooled.client.run(code=MARK) for _ in range(8)))
    assert [result.stdout for result in results] == [b"False\n"] * 12
    after = await filled(pooled)
    assert after["started"] - before["started"] == 12


async def test_a_run_takes_a_waiting_world_of_its_limits(pooled):
    other = RunLimits(memory_bytes=64 * MIB, disk_bytes=2 * MIB)
    await pooled.client.run(code="1", limits=other)  # it makes this class one that is kept
    await pooled.client.run(code="1")
    before = (await filled(pooled))["started"]
    bomb = "x = bytearray(100 << 20)\nprint('held more')"
    assert (await pooled.client.run(code=bomb, limits=other)).outcome.value == "memory"
    assert (await pooled.client.run(code=bomb)).stdout == b"held more\n"
    full = "n = open('/work/f', 'wb', 0).write(bytes(4 << 20))\nprint(n)"
    assert int((await pooled.client.run(code=full, limits=other)).stdout or 0) <= 2 * MIB
    assert (await filled(pooled))["started"] == before + 3


async def test_a_waiting_world_that_died_is_not_given_out(pooled):
    await filled(pooled)
    for group in leaf_groups(pooled):
        for pid in Path(group, "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # one of them takes the others along
                os.kill(int(pid), signal.SIGKILL)
    await filled(pooled, 0)
    assert (await pooled.client.run(code="print(1)")).stdout == b"1\n"
    await filled(pooled)


def leaf_groups(daemon):
    return [
        f"{folder}/{name}"
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(f"slipway-{daemon.process.pid}-")
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", CONTAINED)
async def test_an_attack_is_held_in_a_waiting_world_too(pooled, name):
    await filled(pooled)
    result = await pooled.client.run(code=attack(CONTAINED[name]))
    assert result.stdout.startswith(b"held"), result


async def test_stopping_takes_down_the_worlds_that_wait(tmp_path):
    with running_sandboxd(tmp_path, "--ahead", "3") as daemon:
        await filled(daemon, 3)
        daemon.process.terminate()
        await asyncio.to_thread(daemon.process.wait, 30)
    assert await settled(daemon) == []


async def test_killing_the_starter_ends_its_worlds_and_another_takes_its_place(tmp_path):
    with running_sandboxd(tmp_path, "--ahead", "2") as daemon:
        await filled(daemon, 2)
        [starter] = psutil.Process(daemon.process.pid).children()
        starter.kill()
        await filled(daemon, 0)
        assert (await daemon.client.run(code="print(1)")).stdout == b"1\n"
        await filled(daemon, 2)
