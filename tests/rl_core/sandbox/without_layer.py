"""Runs the controls: each attack in the whole sandbox, and with layers taken off. Prints JSON. For tests alone.

A script of its own, because as root a launcher takes its process into a mount namespace of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from rl_core.sandbox import launch
from rl_core.sandbox.cgroups import Cgroups, Group
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.layers import build_launcher
from rl_core.sandbox.protocol import RunLimits, RunRequest
from rl_core.sandbox.reaper import Reaper
from tests.rl_core.sandbox.controls import CONTROLS, SETUID, SPIN_A_LITTLE

ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
SLOT, FOREIGN_UID = 90, 54_322
LOOSE = {"cgroup memory": {"memory_bytes": 400 << 20}, "cgroup pids": {"pids": 60}}
FLAGS = {
    "user namespace": {"--unshare-user": 1, "--disable-userns": 1, "--uid": 2, "--gid": 2},
    "pid namespace": {"--unshare-pid": 1},
    "net namespace": {"--unshare-net": 1},
    "ipc namespace": {"--unshare-ipc": 1},
    "uts namespace": {"--unshare-uts": 1, "--hostname": 2},
    "cgroup namespace": {"--unshare-cgroup": 1},
    "no nested users": {"--disable-userns": 1},
}  # fmt: skip
INSTEAD = {
    "mount namespace": ["--ro-bind", "/", "/host"],
    "no /proc": ["--proc", "/usr/proc"],
    "no capabilities": ["--cap-add", "CAP_DAC_OVERRIDE"],
}
_libc, _rlimits = ctypes.CDLL(None, use_errno=True), launch._rlimits


@dataclasses.dataclass
class Host:
    """Things of the host's that an attack would like to reach."""

    folder: Path
    uid: int | None
    values: dict[str, object]
    victim: subprocess.Popen | None = None

    def start_victim(self) -> None:
        """A process of the slot's user, which a run without its namespaces may have killed."""
        if self.victim is None or self.victim.poll() is not None:
            self.victim = subprocess.Popen(["sleep", "600"], user=self.uid, start_new_session=True)
            self.values["victim"] = self.victim.pid

    def end_victim(self) -> None:
        """Leave nothing behind."""
        if self.victim:
            self.victim.kill()
            self.victim.wait()

    def filled(self, code: str) -> str:
        """The attack, with the names of these things."""
        return re.sub(
            r"\{(" + "|".join(self.values) + r")(!r)?\}",
            lambda found: repr(self.values[found[1]]) if found[2] else str(self.values[found[1]]),
            code,
        )

    def binds(self) -> list[tuple[Path, str]]:
        """Files that are shown in every world."""
        return [(self.folder / name, f"/usr/{name}") for name in ("private", "foreign", "shared")]


@contextlib.contextmanager
def host(uid: int | None) -> Iterator[Host]:
    """Start listeners, a process of the slot's user, a queue of messages, and make files."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name, mode in {"private": 0o600, "foreign": 0o600, "shared": 0o666, "open": 0o644}.items():
        (folder / name).write_text("the host's")
        (folder / name).chmod(mode)
    if uid is not None:
        os.chown(folder / "foreign", FOREIGN_UID, FOREIGN_UID)
    abstract, key = f"\0slipway-control-{os.getpid()}", 0x51000000 + os.getpid()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        queue = _libc.msgget(key, 0o1666)
        stack.callback(_libc.msgctl, queue, 0, None)
        port = listening(stack, socket.create_server(("127.0.0.1", 0)))
        udp = listening(stack, datagram_socket())
        listening(stack, abstract_socket(abstract))
        values = {"port": port, "udp": udp, "abstract": abstract, "queue": key, "path": str(folder / "open")}
        things = Host(folder, uid, values | {"node": os.uname().nodename})
        stack.callback(things.end_victim)
        yield things


def datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


def abstract_socket(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(name)
    made.listen()
    return made


def listening(stack: contextlib.ExitStack, listener: socket.socket) -> int:
    """Answer everybody in a thread. Returns the port."""
    threading.Thread(target=answer, args=(listener,), daemon=True).start()
    stack.callback(listener.close)
    return listener.getsockname()[1] if listener.family == socket.AF_INET else 0


def answer(listener: socket.socket) -> None:
    while True:
        if listener.type == socket.SOCK_DGRAM:
            listener.sendto(b"secret", listener.recvfrom(16)[1])
        else:
            with listener.accept()[0] as connection:
                connection.send(b"secret")


@dataclasses.dataclass
class WatchedGroup:
    """A group that says whether its processor limit ever held it back.

    The limit is a tenth of what it was, so that a busy machine reaches it too; or it is off.
    """

    inner: Group
    free: bool
    throttled: int = 0

    def __post_init__(self) -> None:
        self.cpu: Path = getattr(self.inner, "cpu", None) or self.inner.folder
        v1 = (self.cpu / "cpu.cfs_quota_us").exists()
        limit = self.cpu / ("cpu.cfs_quota_us" if v1 else "cpu.max")
        tenth = str(int(limit.read_text().split()[0]) // 10)
        limit.write_text(("-1" if v1 else "max") if self.free else tenth)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def kill(self) -> None:
        words = dict(line.split() for line in (self.cpu / "cpu.stat").read_text().splitlines())
        self.throttled = int(words["nr_throttled"])
        self.inner.kill()


@dataclasses.dataclass
class WatchedCgroups:
    """Groups whose limits are looser than a run asks for."""

    inner: Cgroups
    off: frozenset[str]
    watched: bool
    last: WatchedGroup | None = None

    def create(self, name: str, limits: RunLimits) -> Group:
        loose = {key: value for layer, change in LOOSE.items() if layer in self.off for key, value in change.items()}
        group = self.inner.create(name, changed(limits, loose))
        if not self.watched:
            return group
        self.last = WatchedGroup(group, "cgroup cpu" in self.off)
        return self.last


@dataclasses.dataclass
class BareLauncher(Launcher):
    """A launcher without some of its layers."""

    off: frozenset[str] = frozenset()

    def _environment(self) -> dict[str, str]:
        return super()._environment() | ({"SLIPWAY_SECRET": "x"} if "empty environment" in self.off else {})

    def _argv(self, *arguments) -> list[str]:
        argv = super()._argv(*arguments)
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
        if "closed descriptors" in self.off:
            argv = [word.replace("os.closerange(3, 256)", "pass") for word in argv]
        return argv


def changed(limits: RunLimits, changes: dict[str, int]) -> RunLimits:
    return RunLimits(**{**{name: getattr(limits, name) for name in RunLimits.__struct_fields__}, **changes})


def without(launcher: Launcher, off: frozenset[str], host: Host, *, watched: bool) -> BareLauncher:
    """A launcher that lacks these layers."""
    # What a run leaves behind is killed with kill(-1): outside a pid namespace that is all of its user's processes.
    assert "pid namespace" not in off or (launcher.first_uid is not None and "own user" not in off)
    kept = {f.name: getattr(launcher, f.name) for f in dataclasses.fields(Launcher) if f.name != "_serial"}
    kept["runtime"] = dataclasses.replace(launcher.runtime, binds=(*launcher.runtime.binds, *host.binds()))
    kept["cgroups"] = WatchedCgroups(launcher.cgroups, off, watched)
    if "seccomp" in off:
        kept["program"] = ALLOW_ALL
    if "landlock" in off:
        kept["landlock"] = False
    if "own user" in off:
        kept["first_uid"] = None
    kinds = {getattr(resource, f"RLIMIT_{name.split()[1]}") for name in off if name.startswith("rlimit ")}
    launch._rlimits = lambda *a, **k: [bound for bound in _rlimits(*a, **k) if bound[0] not in kinds]
    return BareLauncher(**kept, off=off)


async def attacked(launcher: Launcher, code: str, changes: dict[str, int], off: frozenset[str], host: Host) -> str:
    """What the attack printed."""
    host.start_victim()
    bare = without(launcher, off, host, watched=code == SPIN_A_LITTLE)
    limits = changed(RunLimits(wall_s=20.0), changes)
    if code == SETUID:
        return await asyncio.to_thread(setuid_program, bare, limits, host)
    argv = ["python3", "-I", "-S", "-c", host.filled(code)]
    result = await bare.run(RunRequest(argv=argv, limits=limits), slot=SLOT)
    text = f"{result.outcome} {result.stdout.decode()} {result.stderr.decode()[-300:]}"
    return text + "ESCAPED" if code == SPIN_A_LITTLE and not bare.cgroups.last.throttled else text


def setuid_program(bare: BareLauncher, limits: RunLimits, host: Host) -> str:
    """Who a setuid program is when it is started as bubblewrap is."""
    program = host.folder / "id"
    shutil.copy(shutil.which("id"), program)
    program.chmod(0o4755)
    if "no new privileges" in bare.off:
        launch._libc = type("NoPrctl", (), {"prctl": lambda *_: 0})()
    group = bare.cgroups.create(f"{os.getpid()}-setuid", limits)
    try:
        before = bare._before_exec(group, limits, SLOT)
        done = subprocess.run([program, "-u"], preexec_fn=before, capture_output=True, text=True, check=True)
    finally:
        launch._libc = _libc
        group.kill()
        group.remove()
    return "ESCAPED" if done.stdout == "0\n" else f"held as {done.stdout}"


async def main() -> None:
    launcher, _ = await build_launcher()
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
    sys.stdout.write(json.dumps(seen))


Reaper.adopt_orphans()
asyncio.run(main())
