"""Starting a sandbox: every layer of it, said as the message to the starter and as bubblewrap's command line.

Layers in order: empty environment, cgroup, rlimits, the slot's own user, no_new_privs, bubblewrap's namespaces over a
read-only root with one sized tmpfs, the seccomp filter, Landlock inside.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import WorldError
from rl_core.sandbox import starter
from rl_core.sandbox.cgroups import Cgroups, Group
from rl_core.sandbox.inside.packed import LOADER, packed
from rl_core.sandbox.job import encode_job
from rl_core.sandbox.protocol import RunLimits, RunRequest, RunResult
from rl_core.sandbox.runtime import Runtime
from rl_core.sandbox.seccomp import seccomp_program
from rl_core.sandbox.snapshots import Snapshot
from rl_core.sandbox.world import World

ENVIRONMENT = {
    "PATH": "/python/bin:/usr/bin:/bin",
    "HOME": "/work",
    "TMPDIR": "/work/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/lib",
    "PYTHONDONTWRITEBYTECODE": "1",  # what is not written is no change of the tree
}
IDENTITIES = 1024
PASSWD = b"sandbox:x:65534:65534::/work:/bin/sh\n"  # there are programs that ask who they are
_SECCOMP_FD, _PASSWD_FD, _INSIDE_FD, _CONTROL_FD = 3, 4, 5, 6  # in the sandbox, above the standard streams


@dataclass
class Launcher:
    """Starts sandboxes. `first_uid` None runs them as this process's own user, which only root need not do.

    `identities` are numbers of users: each belongs to one sandbox at a time, and the longest unused is taken.
    """

    runtime: Runtime
    cgroups: Cgroups
    first_uid: int | None
    landlock: bool
    program: bytes = field(default_factory=seccomp_program)
    inside: bytes = field(default_factory=packed)
    identities: deque[int] = field(default_factory=lambda: deque(range(IDENTITIES)))
    started: int = 0
    _starter: Starter | None = None

    async def run(self, request: RunRequest, base: Snapshot | None = None) -> RunResult:
        """Start a sandbox and run a command in it. Raises: SpecError, WorldError when the sandbox does not start."""
        job = encode_job(request, base)
        world = self.start(request.limits)
        try:
            return await world.run(request, job, base)
        finally:
            await world.close()

    def close(self) -> None:
        """Leave nothing, when every world is gone."""

    def start(self, limits: RunLimits) -> World:
        """Start a sandbox, which then waits for its job. Needs a running event loop. Raises: WorldError."""
        with self.identity() as identity:
            group = self.cgroups.create(f"{os.getpid()}-{identity}-{self.started}", limits)
            control, theirs = socket.socketpair()
            (in_read, in_write), (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe(), os.pipe()
            files = [memory_file(content) for content in (self.program, PASSWD, self.inside)]
            given = [in_read, out_write, err_write, *files, theirs.fileno()]
            world = World(group, control, (in_write, out_read, err_read), lambda: self.identities.append(identity))
            try:
                self.starter().start(self.message(group, limits, identity), given)
            except WorldError:
                world.forget()
                raise
            finally:
                theirs.close()
                for descriptor in given[:-1]:
                    os.close(descriptor)
        return world

    @contextlib.contextmanager
    def identity(self) -> Iterator[int]:
        """The number of a user that no sandbox has; given back where none is started with it. Raises: WorldError."""
        if not self.identities:
            raise WorldError("no user is left for a sandbox: processes of earlier runs do not die")
        self.started += 1
        taken = self.identities.popleft()
        try:
            yield taken
        except BaseException:
            self.identities.append(taken)
            raise

    def starter(self) -> Starter:
        """The process that starts sandboxes; another one if it is gone."""
        if self._starter is None or self._starter.process.poll() is not None:
            self._starter = Starter()
        return self._starter

    def message(self, group: Group, limits: RunLimits, identity: int) -> dict[str, object]:
        """What the starter is told: see `rl_core.sandbox.starter.become`."""
        uid = None if self.first_uid is None else self.first_uid + identity
        return {
            "argv": self.argv(limits),
            "environment": self.environment(),
            "cgroups": group.doors(),
            "rlimits": rlimits(limits, own_user=uid is not None),
            "uid": uid,
        }

    def environment(self) -> dict[str, str]:
        """All that bubblewrap itself gets: its first process inside keeps it to be read."""
        return {"LD_LIBRARY_PATH": str(self.runtime.bwrap_libs)} if self.runtime.bwrap_libs else {}

    def argv(self, limits: RunLimits) -> list[str]:
        """The command line of bubblewrap: what is not named here does not exist inside."""
        argv = [str(self.runtime.bwrap)]
        argv += [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup")]
        argv += ["--disable-userns", "--new-session", "--die-with-parent", "--clearenv"]
        argv += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"]
        for source, target in self.runtime.binds:
            argv += ["--ro-bind", str(source), target]
        for target, name in self.runtime.links:
            argv += ["--symlink", target, name]
        for folder in self.runtime.hidden:
            argv += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
        for device in ("null", "zero", "urandom", "random"):
            argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        argv += ["--size", str(limits.disk_bytes), "--tmpfs", "/work", "--symlink", "/work/tmp", "/tmp"]  # noqa: S108
        argv += ["--perms", "0444", "--file", str(_PASSWD_FD), "/etc/passwd"]
        argv += ["--remount-ro", "/", "--chdir", "/work"]
        for name, value in ENVIRONMENT.items():
            argv += ["--setenv", name, value]
        argv += ["--seccomp", str(_SECCOMP_FD), "--", "/python/bin/python3", "-I", "-S", "-B", "-c", LOADER]
        return [*argv, str(_INSIDE_FD), str(len(self.inside)), str(_CONTROL_FD), str(int(self.landlock))]


class Starter:
    """The starter's process, seen from here."""

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(starter.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
            )

    def start(self, message: dict[str, object], descriptors: list[int]) -> None:
        """Start one sandbox, whose descriptors from 0 on these become. Raises: WorldError."""
        try:
            socket.send_fds(self.requests, [marshal.dumps(message)], descriptors)
        except OSError as error:
            raise WorldError(f"the process that starts sandboxes is gone: {error}") from error


def rlimits(limits: RunLimits, *, own_user: bool) -> list[tuple[int, int, int]]:
    """Kind, soft and hard limit of each."""
    bounds = [
        (resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.disk_bytes, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_STACK, 8 << 20, 8 << 20),
    ]
    if own_user:  # counted per user: an ordinary user has processes of their own
        bounds.append((resource.RLIMIT_NPROC, limits.pids + 8, limits.pids + 8))
    return bounds


def memory_file(content: bytes) -> int:
    """A descriptor of a file in memory, at its beginning."""
    descriptor = os.memfd_create("slipway")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
