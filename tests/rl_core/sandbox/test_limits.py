"""What model-written code cannot use up: processor, memory, processes, disk, output, time."""

import asyncio
import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from rl_core.sandbox.cgroups import PREFIX
from rl_core.sandbox.launch import IDENTITIES
from rl_core.sandbox.layers import FIRST_UID
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits

SMALL = RunLimits(wall_s=20.0, memory_bytes=64 * MIB, disk_bytes=1 * MIB, pids=16, cpu_s=2)


def limits(**changes):
    return RunLimits(**{**{f: getattr(SMALL, f) for f in RunLimits.__struct_fields__}, **changes})


def leftovers(*daemons):
    """Processes of slot users, and cgroups of runs; not those of other daemons on this machine."""
    own = tuple(f"{PREFIX}{daemon.process.pid}-" for daemon in daemons)
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if FIRST_UID <= folder.stat().st_uid < FIRST_UID + IDENTITIES:
                dead = re.search(r"\) Z (\d+)", (folder / "stat").read_text())  # it is in no group any more
                where = Path("/proc", dead[1]) if dead else folder
                runs = re.findall(rf"{PREFIX}\d+-", (where / "cgroup").read_text())
                if not runs or set(runs) & set(own):
                    processes.append((folder / "comm").read_text().strip())
    cgroups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith(own)]
    return processes + cgroups


async def settled(*daemons):
    deadline = time.monotonic() + 60
    while leftovers(*daemons) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return leftovers(*daemons)


async def test_a_fork_bomb_is_bounded_and_swept_away(sandboxd, sandbox):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await sandbox.run(code=bomb, limits=limits(wall_s=2.0))
    assert result.outcome in (Outcome.TIMEOUT, Outcome.MEMORY, Outcome.KILLED)
    assert await settled(sandboxd) == []


async def test_processes_are_counted(sandboxd, sandbox):
    code = """
import os, time
n = 0
try:
    while True:
        os.fork() or time.sleep(9)
        n += 1
except OSError:
    print(n)
"""
    result = await sandbox.run(code=code, limits=limits(memory_bytes=256 * MIB))
    assert int(result.stdout) <= SMALL.pids
    assert await settled(sandboxd) == []


@pytest.mark.parametrize(
    "bomb",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nfd = os.memfd_create('m')\nfor _ in range(1024): os.write(fd, b'x' * (1 << 20))",
        "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1",
    ],
)
async def test_memory_bombs(sandbox, bomb):
    result = await sandbox.run(code=bomb, limits=limits(disk_bytes=2048 * MIB, cpu_s=20))
    assert result.outcome is Outcome.MEMORY, result


async def test_the_disk_is_small_and_the_only_place_to_write(sandbox):
    code = """
import os, errno
written = 0
for n in range(10):
    try:
        with open(f"/work/f{n}", "wb", buffering=0) as f:
            while True: written += f.write(b"x" * 65536)
    except OSError as error:
        print(error.errno in (errno.ENOSPC, errno.EFBIG))
print(written)
"""
    result = await sandbox.run(code=code, limits=SMALL)
    *failures, written = result.stdout.decode().split()
    assert set(failures) == {"True"}
    assert int(written) <= SMALL.disk_bytes


async def test_inodes_are_bounded_by_memory(sandboxd, sandbox):
    code = "n = 0\nwhile True:\n    open(f'/work/tmp/{n}', 'w').close()\n    n += 1"
    result = await sandbox.run(code=code, limits=limits(cpu_s=20, memory_bytes=32 * MIB))
    assert result.outcome in (Outcome.MEMORY, Outcome.TIMEOUT) or b"No space" in result.stderr, result
    assert await settled(sandboxd) == []


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_an_output_flood_ends_the_run(sandbox, stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    result = await sandbox.run(code=code, limits=limits(output_bytes=10_000))
    assert result.outcome is Outcome.OUTPUT_LIMIT
    assert len(getattr(result, stream)) == 10_000


async def test_spinning_uses_up_its_processor_time(sandbox):
    result = await sandbox.run(code="while True: pass", limits=limits(cpu_s=1))
    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, -24)


@pytest.mark.parametrize(
    "code",
    ["import time; time.sleep(60)", "import signal, time\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)"],
)
async def test_sleeping_past_the_limit(sandbox, code):
    result = await sandbox.run(code=code, limits=limits(wall_s=1.0))
    assert result.outcome is Outcome.TIMEOUT
    assert 1.0 <= result.wall_s < 60


async def test_a_daemon_does_not_outlive_its_run(sandboxd, sandbox):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(5)
        open("/work/out/late", "w").write("x")
        time.sleep(60)
    os._exit(0)
os.wait()
print("done")
"""
    result = await sandbox.run(code=code, limits=SMALL)
    assert (result.outcome, result.stdout, result.artifacts) == (Outcome.OK, b"done\n", {})
    assert await settled(sandboxd) == []


async def test_exit_codes_signals_and_input(sandbox):
    assert (await sandbox.run(code="raise SystemExit(3)")).exit_code == 3
    crash = await sandbox.run(code="import os; os.abort()")
    assert (crash.outcome, crash.exit_code) == (Outcome.KILLED, -6)
    echo = await sandbox.run(code="import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 300_000)
    assert echo.stdout == b"300000\n"
    unread = await sandbox.run(code="print('ok')", stdin=b"x" * 300_000)
    assert (unread.outcome, unread.stdout) == (Outcome.OK, b"ok\n")
    missing = await sandbox.run(["/bin/none"])
    assert missing.exit_code == 127
    assert b"cannot start /bin/none" in missing.stderr
