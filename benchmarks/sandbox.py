"""What a world costs to start: a real sandboxd asked over its socket, Python inside, every layer on.

A start is a request of the client until its answer: one short Python program in a fresh sandbox. `cold_` figures are of
as many at once as there are cores; in turn with them, in blocks, the same interpreter runs the same program from bare
fork and exec, and in bubblewrap with its namespaces alone (where it is installed).

- `cold_per_s`, `cold_p50_ms`, `cold_p99_ms`; `alone_p50_ms`, `alone_p99_ms`: one at a time, nothing beside it;
- `cold_cpu_ms`: processor time of a start, the client's, sandboxd's and the world's together, which what else runs on
  the machine does not change; it is taken by a cgroup (v1, as root);
- `bare_…`, `bwrap_…`: the same of the peers; `cold_vs_bare`, `cold_vs_bwrap`: our starts a second ÷ theirs ;
- `pool_p50_ms`, `pool_p99_ms`: one at a time while worlds wait that were started ahead;
- `burst_s`: 500 worlds asked at once by ten clients, until the last answer; `burst_client_max_vs_median`: the longest
  mean wait of a client ÷ the median one; `burst_late_share`: the wait of a client that asks for one world behind the
  burst ÷ what the burst takes, 1 if it waits for all; `burst_daemon_peak_mb`, `daemon_before_mb`: the most memory that
  sandboxd has held, after the burst and before it;
- `left_processes`, `left_zombies`, `left_cgroups`, `left_mounts` and their sum `leftovers`: what is there after `runs`
  runs and was not before the first. Anything but 0 fails the benchmark. `left_descriptors` are sandboxd's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks.measure import Progress, interleaved_medians, rounds
from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.cgroups import PREFIX
from rl_core.sandbox.client import SandboxClient

WORLDS: Final = 500
CLIENTS: Final = 10
AHEAD: Final = 8
_PROGRAM: Final = "print(6 * 7)"
_ANSWER: Final = b"42\n"
_CORES: Final = len(os.sched_getaffinity(0))
_SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Traces:
    """What a sandboxd has around it: nothing of it may grow with the number of runs."""

    processes: int
    zombies: int
    cgroups: int
    mounts: int
    descriptors: int

    @classmethod
    def of(cls, daemon: int) -> Traces:
        """Descendants of the daemon (it adopts orphans), its cgroups, the mounts that it and we see."""
        process = psutil.Process(daemon)
        states = []
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                states.append(child.status())
        zombies = states.count(psutil.STATUS_ZOMBIE)
        names = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
        cgroups = sum(name.startswith(f"{PREFIX}{daemon}-") for name in names)
        seen = [Path(f"/proc/{pid}/mountinfo").read_text().count("\n") for pid in (daemon, "self")]
        return cls(len(states) - zombies, zombies, cgroups, sum(seen), process.num_fds())

    def since(self, before: Traces) -> dict[str, int]:
        """What there is now and was not before, by its key."""
        now, then = asdict(self), asdict(before)
        return {f"left_{name}": now[name] - then[name] for name in now}


@dataclass(slots=True)
class Starts:
    """A way of starting the program, and how long each start took."""

    block: Callable[[], list[float]]
    blocks: list[list[float]] = field(default_factory=list)

    def __call__(self) -> None:
        """Run one block."""
        self.blocks.append(self.block())

    def figures(self, name: str, per_s: float | None = None) -> dict[str, float]:
        """Percentiles over all blocks but the first, which warms."""
        times = sorted(1000 * taken for block in self.blocks[1:] for taken in block)
        result = {} if per_s is None else {f"{name}_per_s": per_s}
        return result | {f"{name}_p50_ms": statistics.median(times), f"{name}_p99_ms": times[int(len(times) * 0.99)]}


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """See the module's text."""
    missing = []
    progress("from the pool")
    pool = Starts(lambda: from_pool(rounds(quick=quick)))
    for _ in range(2):
        pool()
    with contextlib.ExitStack() as stack:
        process, socket = stack.enter_context(sandboxd("--ahead", "0"))
        client = SandboxClient(socket)
        before = Traces.of(process.pid)
        many, few = (120, 20) if quick else (200, 40)
        used = stack.enter_context(cpu_used(process.pid))
        cpu: list[float] = []

        def cold() -> list[float]:
            before, own = used(), time.process_time()
            times = ours(client, many, _CORES)
            cpu.append(1000 * (used() - before + time.process_time() - own) / many)
            return times

        ways = {"cold": Starts(cold), "bare": Starts(lambda: peer(_bare(), many))}
        if reason := _bwrap_problem():
            missing.append(f"bwrap_ ({reason})")
        else:
            ways["bwrap"] = Starts(lambda: peer(_bwrap(), many))
        progress(f"blocks of {many} starts, {_CORES} at once: {', '.join(ways)}")
        medians = interleaved_medians(ways, repeats=rounds(quick=quick))
        progress("one at a time")
        alone = Starts(lambda: ours(client, few, 1))
        for _ in range(rounds(quick=quick) + 1):
            alone()
        memory = peak_mb(process.pid)
        progress(f"a burst of {WORLDS} worlds from {CLIENTS} clients")
        ended = asyncio.run(burst(socket, WORLDS, CLIENTS))
        runs = sum(len(block) for way in (ways["cold"], alone) for block in way.blocks) + WORLDS + 1
        left = leftovers(process.pid, before, runs)
        after = peak_mb(process.pid)
    per_s = {name: many / seconds for name, seconds in medians.items()}
    result: dict[str, object] = {"missing": missing}
    for name, way in ways.items():
        result |= way.figures(name, per_s[name])
        if name != "cold":
            result[f"cold_vs_{name}"] = per_s["cold"] / per_s[name]
    if math.isfinite(cpu[0]):
        result["cold_cpu_ms"] = statistics.median(cpu)
    else:
        missing.append("cold_cpu_ms (no cgroup of version 1 to make)")
    memory_mb = {"daemon_before_mb": memory, "burst_daemon_peak_mb": after}
    return result | alone.figures("alone") | pool.figures("pool") | ended | memory_mb | left | {"runs": runs}


@contextlib.contextmanager
def cpu_used(process: int) -> Iterator[Callable[[], float]]:
    """What a process and all that it starts use of the processor from now on, s; infinite where that is not counted."""
    own = re.search(r"^\d+:cpuacct:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    home = Path("/sys/fs/cgroup/cpuacct") / own[1].lstrip("/") if own else Path("/nowhere")
    group = home / f"slipwaybench-{process}"
    try:
        group.mkdir()
    except OSError:
        yield lambda: math.inf
        return
    for member in (psutil.Process(process), *psutil.Process(process).children(recursive=True)):
        (group / "cgroup.procs").write_text(str(member.pid))
    yield lambda: int((group / "cpuacct.usage").read_text()) / 1e9
    for pid in (group / "cgroup.procs").read_text().split():
        (home / "cgroup.procs").write_text(pid)
    group.rmdir()


def ours(client: SandboxClient, count: int, at_once: int) -> list[float]:
    """Seconds of each start through sandboxd."""
    times: list[float] = []

    async def some(share: int) -> None:
        for _ in range(share):
            times.append(await _start(client))

    async def all_of_them() -> None:
        await asyncio.gather(*(some(count // at_once) for _ in range(at_once)))

    asyncio.run(all_of_them())
    return times


def from_pool(times: int) -> list[float]:
    """Seconds of each start from worlds that wait, all of which wait again before each block."""

    async def blocks(client: SandboxClient) -> list[float]:
        taken = []
        for _ in range(times):
            while (await client.health())["ahead"] != AHEAD:
                await asyncio.sleep(0.01)
            taken += [await _start(client) for _ in range(AHEAD)]
        return taken

    with sandboxd("--ahead", str(AHEAD)) as (_, socket):
        return asyncio.run(blocks(SandboxClient(socket)))


async def _start(client: SandboxClient, name: str = "") -> float:
    started = time.perf_counter()
    result = await client.run(code=_PROGRAM, client=name)
    if result.stdout != _ANSWER:
        raise RuntimeError(f"a world ended with {result.outcome.value}: {result.stderr[-300:]!r}")
    return time.perf_counter() - started


def peer(command: list[str], count: int) -> list[float]:
    """Seconds of each start of a command that prints the same answer."""

    def start(_: int) -> float:
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=True)
        if done.stdout != _ANSWER:
            raise RuntimeError(f"{command[0]} answered {done.stdout!r}")
        return time.perf_counter() - started

    with ThreadPoolExecutor(_CORES) as threads:
        return list(threads.map(start, range(count)))


def _bare() -> list[str]:
    return [str(Path(sys.executable).resolve()), "-I", "-S", "-c", _PROGRAM]


def _bwrap() -> list[str]:
    flags = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    return ["bwrap", *flags, "--", *_bare()]


def _bwrap_problem() -> str:
    """Why the peer cannot take part; empty if it can."""
    if shutil.which("bwrap") is None:
        return "not installed"
    done = subprocess.run(_bwrap(), capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()[-200:]


async def burst(socket: Path, worlds: int, clients: int) -> dict[str, float]:
    """Many worlds asked at once, the clients' requests in turn, and one of another client last of all."""
    client = SandboxClient(socket)
    started = time.perf_counter()
    *waits, late = await asyncio.gather(
        *(_start(client, f"client {number % clients}") for number in range(worlds)), _start(client, "late")
    )
    seconds = time.perf_counter() - started
    means = [statistics.fmean(waits[number::clients]) for number in range(clients)]
    return {
        "burst_worlds": len(waits),
        "burst_s": seconds,
        "burst_per_s": len(waits) / seconds,
        "burst_client_max_vs_median": max(means) / statistics.median(means),
        "burst_late_share": late / seconds,
    }


def leftovers(daemon: int, before: Traces, runs: int) -> dict[str, int]:
    """What the runs have left, once it has had the time to go. Raises: RuntimeError when that is anything."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        left = Traces.of(daemon).since(before)
        total = sum(count for name, count in left.items() if name != "left_descriptors")
        if left == dict.fromkeys(left, 0) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if total:
        raise RuntimeError(f"{runs} runs have left {total} things behind: {left}")
    return left | {"leftovers": total}


def peak_mb(process: int) -> float:
    """The most memory that a process has held so far, MB (of 2²⁰ bytes)."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


@contextlib.contextmanager
def sandboxd(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A sandboxd of our own, once it answers, and its socket. Raises: SandboxRefused."""
    with tempfile.TemporaryDirectory() as folder:
        socket, log = Path(folder, "s.sock"), Path(folder, "log")
        command = [sys.executable, "-m", "rl_core.sandbox", "--socket", str(socket), "--state", folder, *arguments]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command, cwd=Path(__file__).parents[1], env={"PATH": os.defpath}, stderr=stderr, stdout=stderr
            )
        try:
            _wait(process, SandboxClient(socket), log)
            yield process, socket
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], client: SandboxClient, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            asyncio.run(client.health())
        except WorldError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SandboxRefused(log.read_text()[-1000:]) from error
            time.sleep(0.05)
        else:
            return
