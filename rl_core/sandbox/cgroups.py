"""One cgroup per run, under cgroup v1 or v2: memory with swap, processes, processor. Killed until it is empty.

Version 1: a directory in each of the memory, pids and cpu hierarchies. Version 2: one directory. `hierarchies` finds
where they may be made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl_core.errors import WorldError
from rl_core.sandbox.protocol import RunLimits

# bubblewrap, its init and the supervisor inside count as processes of the run too.
OVERHEAD_PIDS = 3
_PERIOD_US = 100_000
KILL_S = 10.0
PREFIX = "slipway-"
CONTROLLERS = ("memory", "pids", "cpu")


class RunStuck(WorldError):
    """Processes of a run do not die. Its slot must not be used again."""

    code = "sandbox_run_stuck"
    retryable = True


class Group(Protocol):
    """The cgroup of one run."""

    def doors(self) -> list[str]:
        """Files into which a process writes 0 to enter. It does so before it drops privileges."""
        ...

    def kill(self) -> bool:
        """Kill everything in it. Returns whether there was nothing: call it again until there is."""
        ...

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed."""
        ...

    def remove(self) -> bool:
        """Remove it. Returns False while a process in it is still dying. Raises: WorldError."""
        ...


class Cgroups(Protocol):
    """Where groups come from."""

    version: int

    def create(self, name: str, limits: RunLimits) -> Group:
        """A fresh group with these limits. Raises: WorldError."""
        ...

    def remove_stale(self) -> None:
        """Empty and remove groups that a sandboxd which is gone has left behind."""
        ...


@dataclass
class GroupV1:
    """A directory in each hierarchy."""

    memory: Path
    pids: Path
    cpu: Path
    _all: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._all = tuple(dict.fromkeys((self.memory, self.pids, self.cpu)))

    def doors(self) -> list[str]:
        """See Group."""
        return [str(folder / "cgroup.procs") for folder in self._all]

    def kill(self) -> bool:
        """See Group."""
        write(self.pids / "pids.max", "0")  # no process can be made any more: killing converges
        return _kill(self.pids / "cgroup.procs")

    def oom_kills(self) -> int:
        """See Group."""
        return _counter(self.memory / "memory.oom_control", "oom_kill")

    def remove(self) -> bool:
        """See Group."""
        return all(_remove(folder) for folder in self._all)


@dataclass
class GroupV2:
    """A directory in the one hierarchy."""

    folder: Path

    def doors(self) -> list[str]:
        """See Group."""
        return [str(self.folder / "cgroup.procs")]

    def kill(self) -> bool:
        """See Group."""
        write(self.folder / "pids.max", "0")
        if (self.folder / "cgroup.kill").exists():
            write(self.folder / "cgroup.kill", "1")
        return _kill(self.folder / "cgroup.procs")

    def oom_kills(self) -> int:
        """See Group."""
        return _counter(self.folder / "memory.events", "oom_kill")

    def remove(self) -> bool:
        """See Group."""
        return _remove(self.folder)


@dataclass
class CgroupsV1:
    """Hierarchies of version 1, by controller: this process's own directory in each."""

    bases: dict[str, Path]
    version: int = 1

    def create(self, name: str, limits: RunLimits) -> Group:
        """See Cgroups."""
        memory, pids, cpu = (self.bases[controller] / (PREFIX + name) for controller in CONTROLLERS)
        group = GroupV1(memory, pids, cpu)
        for folder in dict.fromkeys((memory, pids, cpu)):
            _mkdir(folder)
        write(memory / "memory.limit_in_bytes", str(limits.memory_bytes))
        swap_limit = memory / "memory.memsw.limit_in_bytes"
        if swap_limit.exists():
            write(swap_limit, str(limits.memory_bytes))
        else:
            write(memory / "memory.swappiness", "0")
        write(pids / "pids.max", str(limits.pids + OVERHEAD_PIDS))
        write(cpu / "cpu.cfs_period_us", str(_PERIOD_US))
        write(cpu / "cpu.cfs_quota_us", str(_PERIOD_US))
        return group

    def remove_stale(self) -> None:
        """See Cgroups."""
        for base in dict.fromkeys(self.bases.values()):
            _remove_stale(base)


@dataclass
class CgroupsV2:
    """The hierarchy of version 2: the directory whose controllers are enabled for children."""

    base: Path
    version: int = 2

    def create(self, name: str, limits: RunLimits) -> Group:
        """See Cgroups."""
        folder = self.base / (PREFIX + name)
        _mkdir(folder)
        write(folder / "memory.max", str(limits.memory_bytes))
        if (folder / "memory.swap.max").exists():
            write(folder / "memory.swap.max", "0")
        write(folder / "pids.max", str(limits.pids + OVERHEAD_PIDS))
        write(folder / "cpu.max", f"{_PERIOD_US} {_PERIOD_US}")
        return GroupV2(folder)

    def remove_stale(self) -> None:
        """See Cgroups."""
        _remove_stale(self.base)


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}[0-9]*"):
        owner = folder.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _clear(folder)


def _clear(folder: Path) -> None:
    """Empty and remove a group. Raises: RunStuck."""
    deadline = time.monotonic() + KILL_S
    while not _kill(folder / "cgroup.procs") or not _remove(folder):
        if time.monotonic() > deadline:
            raise RunStuck(f"processes of a run do not die: {folder}")
        time.sleep(0.001)


def _kill(procs: Path) -> bool:
    pids = procs.read_text().split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return not pids


def _counter(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, number = line.partition(" ")
        if name == key:
            return int(number)
    return 0


def _mkdir(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise WorldError(f"cannot make the cgroup {folder}: {error.strerror}") from error


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise WorldError(f"cannot remove the cgroup {folder}: {error.strerror}") from error
    return True


def write(path: Path, text: str) -> None:
    """Set a file of a cgroup. Raises: OSError."""
    with path.open("w") as file:
        file.write(text)
