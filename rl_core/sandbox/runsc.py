"""The other backend: gVisor's `runsc`, which gives each world a kernel of its own in place of a filter of system calls.

Everything else is as in `rl_core.sandbox.launch`: cgroup, own user, one job, a report read as data. It passes nothing
but the standard streams, so the control socket is the standard input, and the job, the input and the snapshot are sent
as bytes. The kernel in the sandbox holds the limits of processes; the cgroup holds all of it, that kernel too.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.cgroups import Group
from rl_core.sandbox.inside.packed import LOADER
from rl_core.sandbox.launch import ENVIRONMENT, PASSWD, Launcher, rlimits
from rl_core.sandbox.protocol import MIB, RunLimits
from rl_core.sandbox.world import World

# What that kernel itself takes: measured as about 40 MB and 30 threads; a process in the sandbox is one outside too.
_OVERHEAD_BYTES, _OVERHEAD_PIDS = 96 * MIB, 128
_PREFIX = "slipway-runsc-"
_HELD_INSIDE = {
    resource.RLIMIT_CPU: "RLIMIT_CPU",
    resource.RLIMIT_FSIZE: "RLIMIT_FSIZE",
    resource.RLIMIT_NOFILE: "RLIMIT_NOFILE",
    resource.RLIMIT_STACK: "RLIMIT_STACK",
    resource.RLIMIT_CORE: "RLIMIT_CORE",
}


def find_runsc() -> Path:
    """Raises: SandboxRefused."""
    found = shutil.which("runsc", path="/usr/local/bin:/usr/bin")
    if found is None:
        raise SandboxRefused("runsc is not installed (Debian: apt-get install runsc); or use --backend bubblewrap")
    return Path(found)


def remove_stale() -> None:
    """Remove the folders of a sandboxd that is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RunscLauncher(Launcher):
    """Starts sandboxes in runsc. Every one has a folder of its own until it is gone."""

    runsc: Path = field(default_factory=find_runsc)
    places: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")))

    def __post_init__(self) -> None:
        """Make the root that all worlds see: empty but for the places of what is mounted, and links."""
        remove_stale()
        self.places.chmod(0o711)
        targets = [*(target for _, target in self.runtime.binds), *self.runtime.hidden]
        for target in (*targets, "/work", "/tmp", "/proc", "/dev", "/sys"):  # noqa: S108
            place = self._root / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if any(source.is_file() for source, bound in self.runtime.binds if bound == target):
                place.touch()
            else:
                place.mkdir(exist_ok=True)
        for target, name in self.runtime.links:
            (self._root / name.lstrip("/")).symlink_to(target)
        (self._root / "etc").mkdir()
        (self._root / "etc/passwd").write_bytes(PASSWD)

    @property
    def _root(self) -> Path:
        return self.places / "root"

    def close(self) -> None:
        """See Launcher."""
        shutil.rmtree(self.places)

    def start(self, limits: RunLimits) -> World:
        """See Launcher."""
        with self.identity() as identity:
            name = f"{os.getpid()}-{identity}-{self.started}"
            roomy = msgspec.structs.replace(
                limits, memory_bytes=limits.memory_bytes + _OVERHEAD_BYTES, pids=limits.pids + _OVERHEAD_PIDS
            )
            group = self.cgroups.create(name, roomy)
            bundle = self._bundle(name, limits, identity)
            control, theirs = socket.socketpair()
            (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
            given = [theirs.fileno(), out_write, err_write]
            world = World(group, control, (None, out_read, err_read), self._giver(identity, bundle))
            try:
                world.tell(self.inside)
                self.starter().start(self.message(group, limits, identity), given)
            except WorldError:
                world.forget()
                shutil.rmtree(bundle)
                raise
            finally:
                theirs.close()
                for descriptor in given[1:]:
                    os.close(descriptor)
        return world

    def _giver(self, identity: int, bundle: Path) -> Callable[[], None]:
        def give_back() -> None:
            shutil.rmtree(bundle)
            self.identities.append(identity)

        return give_back

    def message(self, group: Group, limits: RunLimits, identity: int) -> dict[str, object]:
        """See Launcher."""
        bundle = self.places / f"{os.getpid()}-{identity}-{self.started}"
        flags = ["--rootless", "--network=none", "--ignore-cgroups", f"--root={bundle / 'state'}"]
        # A process inside has one outside that runs its code: processor time is held there.
        outside = [
            limit
            for limit in rlimits(limits, own_user=False)
            if limit[0] in (resource.RLIMIT_CORE, resource.RLIMIT_CPU)
        ]
        return super().message(group, limits, identity) | {
            "argv": [str(self.runsc), *flags, "run", f"--bundle={bundle}", bundle.name],
            "environment": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            "rlimits": outside,
        }

    def _bundle(self, name: str, limits: RunLimits, identity: int) -> Path:
        """The folder of one sandbox, with what is said of it in the form of the Open Container Initiative."""
        bundle = self.places / name
        (bundle / "state").mkdir(parents=True)
        bundle.chmod(0o755)
        if self.first_uid is not None:
            os.chown(bundle / "state", self.first_uid + identity, -1)
        (bundle / "config.json").write_text(json.dumps(self._config(limits)))
        return bundle

    def _config(self, limits: RunLimits) -> dict[str, object]:
        held = [limit for limit in rlimits(limits, own_user=False) if limit[0] in _HELD_INSIDE]
        command = ["/python/bin/python3", "-I", "-S", "-B", "-c", LOADER, "0", str(len(self.inside)), "0", "0"]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 65534, "gid": 65534},
                "args": command,
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "cwd": "/work",
                "noNewPrivileges": True,
                "capabilities": {},
                "rlimits": [{"type": _HELD_INSIDE[kind], "soft": soft, "hard": hard} for kind, soft, hard in held],
            },
            "root": {"path": str(self._root), "readonly": True},
            "hostname": "sandbox",
            "mounts": [
                *(_mount(target, "bind", str(source), "rbind", "ro") for source, target in self.runtime.binds),
                *(_mount(target, "tmpfs", "tmpfs", "ro", "size=4096") for target in self.runtime.hidden),
                _mount("/work", "tmpfs", "tmpfs", f"size={limits.disk_bytes}", "mode=1777"),
                _mount("/tmp", "tmpfs", "tmpfs", f"size={limits.disk_bytes}", "mode=1777"),  # noqa: S108
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, object]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}
