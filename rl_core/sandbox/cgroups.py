"""One cgroup per run, under cgroup v1 or v2: memory with swap, processes, processor. Killed until it is empty.

Version 1: a group in each of the memory, pids and cpu hierarchies, below this process's own. Version 2: a group below
one whose controllers can be delegated: this process's own cgroup if it is alone in it (a systemd scope with
`Delegate=yes`), else, as root, the root of the hierarchy.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.protocol import RunLimits

# bubblewrap, its init and the supervisor inside count as processes of the run too.
OVERHEAD_PIDS = 3
_PERIOD_US = 100_000
_KILL_S = 10.0
_PREFIX = "slipway-"
_NEEDED = ("memory", "pids", "cpu")

HOW_TO_ENABLE = (
    "The sandbox needs a cgroup it may create groups in (memory, pids, cpu). As root that is so on an ordinary "
    "machine; in a container, mount /sys/fs/cgroup read-write. As an unprivileged user, use cgroup v2 with delegation: "
    "`systemd-run --user --scope -p Delegate=yes -- python -m rl_core.sandbox …`"
)


class RunStuck(WorldError):
    """Processes of a run do not die. Its slot must not be used again."""

    code = "sandbox_run_stuck"
    retryable = True


class Group(Protocol):
    """The cgroup of one run."""

    def join(self) -> None:
        """Put the calling process into it. Called in the child, before it drops privileges."""
        ...

    def kill(self) -> None:
        """Kill everything in it until it is empty. Raises: RunStuck when it does not empty."""
        ...

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed."""
        ...

    def remove(self) -> None:
        """Remove it; it must be empty."""
        ...


class Cgroups(Protocol):
    """Where groups come from."""

    version: int

    def create(self, name: str, limits: RunLimits) -> Group:
        """A fresh group with these limits. Raises: WorldError."""
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

    def join(self) -> None:
        """See Group."""
        for folder in self._all:
            _write(folder / "cgroup.procs", str(os.getpid()))

    def kill(self) -> None:
        """See Group."""
        _write(self.pids / "pids.max", "0")  # no process can be made any more: killing converges
        _kill_until_empty(self.pids / "cgroup.procs")

    def oom_kills(self) -> int:
        """See Group."""
        return _counter(self.memory / "memory.oom_control", "oom_kill")

    def remove(self) -> None:
        """See Group."""
        for folder in self._all:
            _remove(folder)


@dataclass
class GroupV2:
    """A directory in the one hierarchy."""

    folder: Path

    def join(self) -> None:
        """See Group."""
        _write(self.folder / "cgroup.procs", str(os.getpid()))

    def kill(self) -> None:
        """See Group."""
        _write(self.folder / "pids.max", "0")
        if (self.folder / "cgroup.kill").exists():
            _write(self.folder / "cgroup.kill", "1")
        _kill_until_empty(self.folder / "cgroup.procs")

    def oom_kills(self) -> int:
        """See Group."""
        return _counter(self.folder / "memory.events", "oom_kill")

    def remove(self) -> None:
        """See Group."""
        _remove(self.folder)


@dataclass
class CgroupsV1:
    """Hierarchies of version 1, by controller: this process's own directory in each."""

    bases: dict[str, Path]
    version: int = 1

    def create(self, name: str, limits: RunLimits) -> Group:
        """See Cgroups."""
        memory, pids, cpu = (self.bases[controller] / (_PREFIX + name) for controller in _NEEDED)
        group = GroupV1(memory, pids, cpu)
        for folder in dict.fromkeys((memory, pids, cpu)):
            _mkdir(folder)
        _write(memory / "memory.limit_in_bytes", str(limits.memory_bytes))
        swap_limit = memory / "memory.memsw.limit_in_bytes"
        if swap_limit.exists():
            _write(swap_limit, str(limits.memory_bytes))
        else:
            _write(memory / "memory.swappiness", "0")
        _write(pids / "pids.max", str(limits.pids + OVERHEAD_PIDS))
        _write(cpu / "cpu.cfs_period_us", str(_PERIOD_US))
        _write(cpu / "cpu.cfs_quota_us", str(_PERIOD_US))
        return group


@dataclass
class CgroupsV2:
    """The hierarchy of version 2: the directory whose controllers are enabled for children."""

    base: Path
    version: int = 2

    def create(self, name: str, limits: RunLimits) -> Group:
        """See Cgroups."""
        folder = self.base / (_PREFIX + name)
        _mkdir(folder)
        _write(folder / "memory.max", str(limits.memory_bytes))
        if (folder / "memory.swap.max").exists():
            _write(folder / "memory.swap.max", "0")
        _write(folder / "pids.max", str(limits.pids + OVERHEAD_PIDS))
        _write(folder / "cpu.max", f"{_PERIOD_US} {_PERIOD_US}")
        return GroupV2(folder)


def find_cgroups(*, proc: Path = Path("/proc/self"), root: bool | None = None) -> Cgroups:
    """The cgroups this machine offers to this process, tried by making a group. Raises: SandboxRefused."""
    as_root = os.geteuid() == 0 if root is None else root
    reasons: list[str] = []
    for make in (_version_1, _version_2):
        try:
            cgroups = make(proc, as_root)
            _remove_stale(cgroups)
            group = cgroups.create(f"{os.getpid()}-probe", RunLimits())
            group.remove()
        except (OSError, WorldError) as error:
            reasons.append(str(error))
        else:
            return cgroups
    raise SandboxRefused(f"no usable cgroup: {'; '.join(reasons)}. {HOW_TO_ENABLE}")


def _version_1(proc: Path, as_root: bool) -> CgroupsV1:
    mounts = _mounts(proc, "cgroup")
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(filter(None, controllers.split(",")), path))
    bases = {}
    for controller in _NEEDED:
        found = [(point, top) for point, top, options in mounts if controller in options.split(",")]
        if not found or controller not in own:
            raise WorldError(f"v1: no {controller} hierarchy")
        bases[controller] = _below(*found[0], own[controller])
    return CgroupsV1(bases)


def _version_2(proc: Path, as_root: bool) -> CgroupsV2:
    mounts = _mounts(proc, "cgroup2")
    if not mounts:
        raise WorldError("v2: not mounted")
    point, top, _ = mounts[0]
    own = [line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")]
    missing = set(_NEEDED) - set((point / "cgroup.controllers").read_text().split())
    if missing or not own:
        raise WorldError(f"v2: no controllers {', '.join(sorted(missing))}")
    base = _below(point, top, own[0])
    problem = _delegate(base)
    if problem and as_root:
        base, problem = point, _delegate(point)
    if problem:
        raise WorldError(f"v2: {base} cannot be delegated: {problem}")
    return CgroupsV2(base)


def _delegate(base: Path) -> str:
    """Enable the controllers for children of `base`; this process moves to a leaf if it is in the way."""
    enable = " ".join(f"+{controller}" for controller in _NEEDED)
    try:
        _write(base / "cgroup.subtree_control", enable)
    except OSError as error:
        if error.errno != errno.EBUSY:
            return str(error)
    else:
        return ""
    try:
        leaf = base / f"{_PREFIX}sandboxd"
        leaf.mkdir(exist_ok=True)
        _write(leaf / "cgroup.procs", str(os.getpid()))
        _write(base / "cgroup.subtree_control", enable)
    except OSError as error:
        return str(error)
    return ""


def _mounts(proc: Path, kind: str) -> list[tuple[Path, str, str]]:
    """Mount point, root within the hierarchy, and options of every cgroup mount of a kind."""
    mounts = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (fstype, _, options) = before.split(), after.split(" ", 2)
        if fstype == kind:
            mounts.append((Path(fields[4]), fields[3], options))
    return mounts


def _below(point: Path, top: str, own: str) -> Path:
    """The directory of this process, where the mount shows the hierarchy from `top` on."""
    relative = own[len(top) :] if top != "/" and own.startswith(top) else own
    return point / relative.lstrip("/")


def _remove_stale(cgroups: Cgroups) -> None:
    """Empty and remove groups that a sandboxd which is gone has left behind."""
    bases = (
        cgroups.bases.values() if isinstance(cgroups, CgroupsV1) else [getattr(cgroups, "base", Path("/nonexistent"))]
    )
    for folder in [found for base in bases for found in base.glob(f"{_PREFIX}[0-9]*")]:
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _kill_until_empty(folder / "cgroup.procs")
            _remove(folder)


def _kill_until_empty(procs: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while pids := procs.read_text().split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise RunStuck(f"{len(pids)} processes of a run do not die: {procs}")
        time.sleep(0.001)


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


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # EBUSY until the last dying process has been reaped
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise WorldError(f"cannot remove the cgroup {folder}: {error.strerror}") from error
            time.sleep(0.002)
        else:
            return


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
