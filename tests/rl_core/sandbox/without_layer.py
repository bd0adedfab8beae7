"""Runs the controls: each attack in the whole sandbox, and with layers taken off. Prints JSON. For tests alone.

A script of its own, because as root a launcher takes its process into a mount namespace of its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import json
import marshal
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from rl_core.errors import SandboxRefused
from rl_core.sandbox import launch, starter
from rl_core.sandbox.cgroups import Cgroups, Group
from rl_core.sandbox.inside import command, supervisor
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.layers import build_launcher, seen_from_inside
from rl_core.sandbox.protocol import RunLimits, RunRequest
from tests.rl_core.sandbox.controls import CONTROLS, OUTLIVE, REFUSED, SETUID, SPIN_A_LITTLE
from tests.rl_core.sandbox.host_things import Host, host

ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
SLOT = 90
# What is asked for in place of a limit that is not the kernel's but sandboxd's own.
UNLIMITED = {"output limit": {"output_bytes": 1 << 20}, "wall limit": {"wall_s": 30.0}}
LOOSE = {"cgroup memory": {"memory_bytes": 400 << 20}, "cgroup pids": {"pids": 60}}
FLAGS = {
    "user namespace": {"--unshare-user": 1, "--disable-userns": 1, "--uid": 2, "--gid": 2},
    "pid namespace": {"--unshare-pid": 1},
    "net namespace": {"--unshare-net": 1},
    "ipc namespace": {"--unshare-ipc": 1},
    "uts namespace": {"--unshare-uts": 1, "--hostname": 2},
    "cgroup namespace": {"--unshare-cgroup": 1},
    "no nested users": {"--disable-userns": 1},
    "cleared environment": {"--clearenv": 1},
    "not root inside": {"--uid": 2, "--gid": 2},
}  # fmt: skip
INSTEAD = {
    "mount namespace": ["--ro-bind", "/", "/host"],
    "no /proc": ["--proc", "/usr/proc"],
    "none of the host's /proc": ["--bind", "/proc", "/usr/hostproc"],
    "none of the host's /sys": ["--bind", "/sys", "/usr/hostsys"],
    "not root inside": ["--uid", "0", "--gid", "0"],
    "no capabilities": ["--cap-add", "CAP_DAC_OVERRIDE"],
}
_libc, _rlimits = ctypes.CDLL(None, use_errno=True), launch.rlimits


@dataclasses.dataclass
class WatchedGroup:
    """A group that says whether its processor limit ever held it back, and who was there when it was to be gone.

    The limit is a tenth of what it was, so that a busy machine reaches it too; or it is off.
    """

    inner: Group
    off: frozenset[str]
    throttled: int = 0
    survivors: int = 0

    def __post_init__(self) -> None:
        self.free = "cgroup cpu" in self.off
        self.cpu: Path = getattr(self.inner, "cpu", None) or self.inner.folder
        v1 = (self.cpu / "cpu.cfs_quota_us").exists()
        limit = self.cpu / ("cpu.cfs_quota_us" if v1 else "cpu.max")
        tenth = str(int(limit.read_text().split()[0]) // 10)
        limit.write_text(("-1" if v1 else "max") if self.free else tenth)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def kill(self) -> bool:
        words = dict(line.split() for line in (self.cpu / "cpu.stat").read_text().splitlines())
        self.throttled = int(words["nr_throttled"])
        return "cgroup kill" in self.off or self.inner.kill()

    def remove(self) -> bool:
        self.survivors = max(self.survivors, self.alive())
        return self.inner.kill() and self.inner.remove()

    def alive(self) -> int:
        """Processes that sleep or run on. One that was killed or held back runs a while before it is gone or sleeps."""
        deadline = time.monotonic() + 20
        while True:
            states = [state_of(int(pid)) for pid in Path(self.inner.doors()[0]).read_text().split()]
            running = [state for state in states if state in ("R", "D")]
            if not running or time.monotonic() > deadline:
                return states.count("S") + len(running)
            time.sleep(0.01)


def state_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    return ""


@dataclasses.dataclass
class WatchedCgroups:
    """Groups whose limits are looser than a run asks for."""

    inner: Cgroups
    off: frozenset[str]
    watched: bool
    last: WatchedGroup | None = None
    version = 0

    def create(self, name: str, limits: RunLimits) -> Group:
        loose = {key: value for layer, change in LOOSE.items() if layer in self.off for key, value in change.items()}
        group = self.inner.create(name, changed(limits, loose))
        if not self.watched:
            return group
        self.last = WatchedGroup(group, self.off)
        return self.last


@dataclasses.dataclass
class BareLauncher(Launcher):
    """A launcher without some of its layers."""

    off: frozenset[str] = frozenset()

    def environment(self) -> dict[str, str]:
        return super().environment() | ({"SLIPWAY_SECRET": "x"} if "empty environment" in self.off else {})

    def argv(self, limits: RunLimits) -> list[str]:
        argv = super().argv(limits)
        for layer, flags in FLAGS.items():
            for flag, words in flags.items():
                if layer in self.off and flag in argv:
                    del argv[argv.index(flag) : argv.index(flag) + words]
        if "sized disk" in self.off:
            at = argv.index("/work") - 3
            del argv[at : at + 2]
        end = argv.index("/", argv.index("--cap-drop")) - 1
        assert argv[end] == "--remount-ro"
        if "read-only root" in self.off:
            del argv[end : end + 2]
        for layer, more in INSTEAD.items():
            if layer in self.off:
                argv[end:end] = more
        if "read-only binds" in self.off:
            argv = ["--bind" if word == "--ro-bind" else word for word in argv]
        return argv


def changed(limits: RunLimits, changes: dict[str, int]) -> RunLimits:
    return RunLimits(**{**{name: getattr(limits, name) for name in RunLimits.__struct_fields__}, **changes})


def without(launcher: Launcher, off: frozenset[str], host: Host, *, watched: bool) -> BareLauncher:
    """A launcher that lacks these layers."""
    # What a run leaves behind is killed with kill(-1): outside a pid namespace that is all of its user's processes.
    harmless = "a kill inside" in off or (launcher.first_uid is not None and "own user" not in off)
    assert "pid namespace" not in off or harmless
    kept = {f.name: getattr(launcher, f.name) for f in dataclasses.fields(Launcher) if f.name != "_starter"}
    kept["runtime"] = dataclasses.replace(launcher.runtime, binds=(*launcher.runtime.binds, *host.binds()))
    kept["cgroups"] = WatchedCgroups(launcher.cgroups, off, watched)
    if "seccomp" in off:
        kept["program"] = ALLOW_ALL
    if "closed descriptors" in off:
        kept["inside"] = altered(launcher.inside, command, "    os.closerange(", "    max(")
    if "a kill inside" in off:
        kept["inside"] = altered(launcher.inside, supervisor, "    kill_the_rest()", "    reap()")
    if "landlock" in off:
        kept["landlock"] = False
    if "own user" in off:
        kept["first_uid"] = None
    kinds = {getattr(resource, f"RLIMIT_{name.split()[1]}") for name in off if name.startswith("rlimit ")}
    launch.rlimits = lambda *a, **k: [bound for bound in _rlimits(*a, **k) if bound[0] not in kinds]
    kept["identities"] = collections.deque([SLOT])
    return BareLauncher(**kept, off=off)


def altered(inside: bytes, module: ModuleType, old: str, new: str) -> bytes:
    """The program inside, with a change of one module."""
    source = Path(module.__file__).read_text()
    assert old in source
    name = module.__name__.rpartition(".")[2]
    modules = dict(marshal.loads(inside)) | {name: compile(source.replace(old, new), name, "exec")}
    return marshal.dumps(list(modules.items()))


async def attacked(launcher: Launcher, code: str, changes: dict[str, int], off: frozenset[str], host: Host) -> str:
    """What the attack printed."""
    host.start_victim()
    bare = without(launcher, off, host, watched=code in (SPIN_A_LITTLE, OUTLIVE))
    own = {key: value for layer, change in UNLIMITED.items() if layer in off for key, value in change.items()}
    limits = changed(RunLimits(wall_s=20.0), changes | own)
    if code == SETUID:
        return await asyncio.to_thread(setuid_program, bare, limits, host)
    argv = ["python3", "-I", "-S", "-c", host.filled(code)]
    result = await bare.run(RunRequest(argv=argv, limits=limits))
    text = f"{result.outcome} {result.stdout.decode()} {result.stderr.decode()[-300:]}"
    if code == OUTLIVE:
        return f"{text} {bare.cgroups.last.survivors} ESCAPED" if bare.cgroups.last.survivors else text
    return text + "ESCAPED" if code == SPIN_A_LITTLE and not bare.cgroups.last.throttled else text


def setuid_program(bare: BareLauncher, limits: RunLimits, host: Host) -> str:
    """Who a setuid program is when it is started as bubblewrap is."""
    program = host.folder / "id"
    shutil.copy(shutil.which("id"), program)
    program.chmod(0o4755)
    if "no new privileges" in bare.off:
        starter._libc = type("NoPrctl", (), {"prctl": lambda *_: 0})()
    group = bare.cgroups.create(f"{os.getpid()}-setuid", limits)
    start = bare.message(group, limits, SLOT)
    try:
        done = subprocess.run(
            [program, "-u"], preexec_fn=lambda: starter.confine(start), capture_output=True, text=True, check=True
        )
    finally:
        starter._libc = _libc
        group.remove()
    return "ESCAPED" if done.stdout == "0\n" else f"held as {done.stdout}"


async def controls(launcher: Launcher) -> dict[str, dict[str, str]]:
    """What each attack printed in the whole sandbox, without what else holds it, and without its layer."""
    root = launcher.first_uid is not None
    seen = {}
    with host(launcher.first_uid + SLOT if root else None) as things:
        for name, control in CONTROLS.items():
            if control.needs_root and not root:
                continue
            base = frozenset(control.also_off)
            worlds = {"whole": frozenset(), "base": base, "without": base | {control.layer}}
            seen[name] = {
                world: await attacked(launcher, control.code, control.limits, off, things)
                for world, off in worlds.items()
            }
    return seen


async def refusals(launcher: Launcher) -> dict[str, str]:
    """Why sandboxd would not start without each layer; empty where it would."""
    seen = {}
    with host(launcher.first_uid + SLOT if launcher.first_uid is not None else None) as things:
        for name, layers in {"nothing": (), **REFUSED}.items():
            bare = without(launcher, frozenset(layers), things, watched=False)
            try:
                await seen_from_inside(bare)
            except SandboxRefused as error:
                seen[name] = str(error)
            else:
                seen[name] = ""
    return seen


async def main() -> None:
    launcher, _ = await build_launcher()
    sys.stdout.write(json.dumps(await {"controls": controls, "refusals": refusals}[sys.argv[1]](launcher)))


asyncio.run(main())
