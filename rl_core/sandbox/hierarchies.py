"""Where this process may make cgroups, found by trying.

Version 1: its own directory in each of the memory, pids and cpu hierarchies. Version 2: a directory whose controllers
can be delegated: its own cgroup if it is alone in it (a systemd scope with `Delegate=yes`), else, as root, the root of
the hierarchy.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rl_core.errors import SandboxRefused, WorldError
from rl_core.sandbox.cgroups import CONTROLLERS, PREFIX, Cgroups, CgroupsV1, CgroupsV2, write
from rl_core.sandbox.protocol import RunLimits

HOW_TO_ENABLE = (
    "The sandbox needs a cgroup it may create groups in (memory, pids, cpu). As root that is so on an ordinary "
    "machine; in a container, mount /sys/fs/cgroup read-write. As an unprivileged user, use cgroup v2 with delegation: "
    "`systemd-run --user --scope -p Delegate=yes -- python -m rl_core.sandbox …`"
)


def find_cgroups(*, proc: Path = Path("/proc/self"), root: bool | None = None) -> Cgroups:
    """The cgroups this machine offers to this process, tried by making a group. Raises: SandboxRefused."""
    as_root = os.geteuid() == 0 if root is None else root
    reasons: list[str] = []
    for make in (_version_1, _version_2):
        try:
            cgroups = make(proc, as_root)
            cgroups.remove_stale()
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
    for controller in CONTROLLERS:
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
    missing = set(CONTROLLERS) - set((point / "cgroup.controllers").read_text().split())
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
    enable = " ".join(f"+{controller}" for controller in CONTROLLERS)
    try:
        write(base / "cgroup.subtree_control", enable)
    except OSError as error:
        if error.errno != errno.EBUSY:
            return str(error)
    else:
        return ""
    try:
        leaf = base / f"{PREFIX}sandboxd"
        leaf.mkdir(exist_ok=True)
        write(leaf / "cgroup.procs", str(os.getpid()))
        write(base / "cgroup.subtree_control", enable)
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
