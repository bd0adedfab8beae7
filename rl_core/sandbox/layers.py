"""Which layers of isolation this machine gives, shown by probes from the inside; and the refusal to run without."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.hierarchies import HOW_TO_ENABLE, find_cgroups
from rl_core.sandbox.launch import ENVIRONMENT, Launcher
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, RunRequest
from rl_core.sandbox.runsc import RunscLauncher
from rl_core.sandbox.runtime import find_runtime

FIRST_UID = 210_000  # above every ordinary and every subordinate user of a usual machine

HOW_TO_ENABLE_NAMESPACES = (
    "The sandbox needs user namespaces for unprivileged users: `sysctl -w user.max_user_namespaces=10000`, on Debian "
    "`kernel.unprivileged_userns_clone=1`, on Ubuntu `kernel.apparmor_restrict_unprivileged_userns=0`; in a container, "
    "a seccomp profile that allows `clone` and `unshare`"
)


class Backend(StrEnum):
    """What makes a sandbox."""

    BUBBLEWRAP = "bubblewrap"  # namespaces of the machine's kernel, and a filter of its system calls
    RUNSC = "runsc"  # gVisor: a kernel of the sandbox's own


class Layer(StrEnum):
    """A layer of isolation, in the order in which they are put on."""

    ENVIRONMENT = "environment"  # an empty environment and no inherited descriptors
    CGROUP = "cgroup"  # memory with swap, processes, processor
    RLIMITS = "rlimits"
    OWN_USER = "own_user"  # a user of its own for every slot
    NO_NEW_PRIVS = "no_new_privs"
    NAMESPACES = "namespaces"  # user, pid, net, ipc, uts, cgroup, and a read-only root
    SECCOMP = "seccomp"
    OWN_KERNEL = "own_kernel"  # in place of the filter
    LANDLOCK = "landlock"


OPTIONAL = frozenset({Layer.OWN_USER, Layer.LANDLOCK})


class LayerState(msgspec.Struct, frozen=True):
    """Whether a layer is there, and what a probe saw."""

    layer: Layer
    present: bool
    detail: str


_PROBE = """
import ctypes, errno, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def failure(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0
libc.ptrace(0, 0, 0, 0)
traced = ctypes.get_errno()
print(json.dumps({
    "environment": sorted(os.environ),
    "descriptors": [fd for fd in range(3, 256) if failure(lambda: os.fstat(fd)) == 0],
    "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    "no_new_privs": libc.prctl(39, 0, 0, 0, 0),
    "seccomp": libc.prctl(21, 0, 0, 0, 0),
    "ptrace": traced,
    "netlink": failure(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "read_only": os.statvfs("/").f_flag & os.ST_RDONLY or failure(lambda: open("/probe", "w")) == errno.EROFS,
    "pid": os.getpid(),
    "users": [*os.getresuid(), *os.getresgid()],
    "kernel": os.uname().release,
    "networks": [socket.if_indextoname(n) for n in range(1, 16) if not failure(lambda: socket.if_indextoname(n))],
    "host": socket.gethostname(),
    "home": os.path.exists("/home") or os.listdir("/etc") != ["passwd"],
}))
"""


async def build_launcher(
    mounts: Mapping[str, Path] | None = None, backend: Backend = Backend.BUBBLEWRAP
) -> tuple[Launcher, list[LayerState]]:
    """A launcher with every layer this machine gives, each seen from inside. `mounts`: software to show at `/opt/NAME`.

    Raises: SandboxRefused when a required layer is missing; the message says how to enable it.
    """
    root = os.geteuid() == 0
    cgroups = find_cgroups()
    runtime = find_runtime(other_users=root, mounts=mounts or {})
    first_uid = FIRST_UID if root else None
    launcher: Launcher
    if backend is Backend.RUNSC:
        launcher = RunscLauncher(runtime, cgroups, first_uid, landlock=False)
    else:
        launcher = Launcher(runtime, cgroups, first_uid, landlock=landlock_abi() > 0)
    return launcher, await seen_from_inside(launcher)


async def seen_from_inside(launcher: Launcher) -> list[LayerState]:
    """Every layer as a probe sees it. Raises: SandboxRefused when a required one is missing."""
    states = await _probe(launcher)
    missing = [state for state in states if not state.present and state.layer not in OPTIONAL]
    if missing:
        shown = "; ".join(f"{state.layer.value}: {state.detail}" for state in missing)
        raise SandboxRefused(f"layers of the sandbox are missing: {shown}. {HOW_TO_ENABLE} {HOW_TO_ENABLE_NAMESPACES}")
    return states


def landlock_abi() -> int:
    """The Landlock version of the kernel; 0 where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(444, None, ctypes.c_size_t(0), 1)))


async def _probe(launcher: Launcher) -> list[LayerState]:
    argv = ["python3", "-I", "-S", "-c", _PROBE]
    try:
        result = await launcher.run(RunRequest(argv=argv, limits=RunLimits(wall_s=20.0)))
    except WorldError as error:
        raise SandboxRefused(f"{error}. {HOW_TO_ENABLE_NAMESPACES}") from error
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        raise SandboxRefused(
            f"the sandbox's probe ended with {result.outcome.value}: {result.stderr.decode(errors='replace')[-400:]}"
        )
    seen = json.loads(result.stdout)
    memory = await launcher.run(
        RunRequest(argv=[*argv[:-1], "x = bytearray(1 << 28)"], limits=RunLimits(memory_bytes=64 * MIB, wall_s=20.0))
    )
    own = launcher.first_uid
    foreign = [*(set(seen["environment"]) - {*ENVIRONMENT, "LC_CTYPE"}), *map(str, seen["descriptors"])]
    contained = seen["host"] == "sandbox" and seen["pid"] < 50 and not seen["home"] and seen["read_only"]
    contained = contained and 0 not in seen["users"] and seen["networks"] == ["lo"]
    place = f"pid {seen['pid']} of user {seen['users'][0]} inside, {'host' if seen['home'] else 'no host'} files"
    return [
        LayerState(Layer.ENVIRONMENT, not foreign, f"not empty: {', '.join(foreign)}" if foreign else "empty"),
        LayerState(Layer.CGROUP, memory.outcome is Outcome.MEMORY, f"v{launcher.cgroups.version}, memory limit held"),
        LayerState(Layer.RLIMITS, seen["core"] == 0 and seen["files"] == 256, f"{seen['files']} files, no core dumps"),
        LayerState(Layer.OWN_USER, own is not None, f"from {own}" if own else "no: only root can give slots users"),
        LayerState(Layer.NO_NEW_PRIVS, seen["no_new_privs"] == 1, "set"),
        LayerState(Layer.NAMESPACES, contained, f"{place}, networks {', '.join(seen['networks'])}"),
        *_kernel(launcher, seen),
    ]


def _kernel(launcher: Launcher, seen: dict[str, Any]) -> list[LayerState]:
    """What stands between a program and the machine's kernel."""
    if isinstance(launcher, RunscLauncher):
        other = seen["kernel"] != os.uname().release
        return [LayerState(Layer.OWN_KERNEL, other, f"runsc, {seen['kernel']} inside")]
    filtered = seen["seccomp"] == 2 and min(seen["ptrace"], seen["netlink"]) > 0
    return [
        LayerState(Layer.SECCOMP, filtered, "ptrace refused"),
        LayerState(Layer.LANDLOCK, launcher.landlock, f"ABI {landlock_abi()}"),
    ]
