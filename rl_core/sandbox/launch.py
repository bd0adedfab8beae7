"""One run: a fresh sandbox built of every layer, bounded, killed by its cgroup, and its report read as data.

Layers in order: empty environment, cgroup, rlimits, the slot's own user, no_new_privs, bubblewrap's namespaces over a
read-only root with one sized tmpfs, the seccomp filter, Landlock inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import WorldError
from rl_core.sandbox.cgroups import Cgroups, Group
from rl_core.sandbox.job import encode_job, outcome_of, read_report
from rl_core.sandbox.protocol import Outcome, RunLimits, RunRequest, RunResult
from rl_core.sandbox.reaper import Reaper
from rl_core.sandbox.runtime import Runtime
from rl_core.sandbox.seccomp import seccomp_program

_ENTER = (Path(__file__).parent / "enter.py").read_text(encoding="utf-8")
_HEADER_BYTES = 256 * 1024
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Launcher:
    """Starts sandboxes. `first_uid` None runs them as this process's own user, which only root need not do."""

    runtime: Runtime
    cgroups: Cgroups
    first_uid: int | None
    landlock: bool
    reaper: Reaper = field(default_factory=Reaper)
    program: bytes = field(default_factory=seccomp_program)
    _serial: int = 0

    async def run(self, request: RunRequest, *, slot: int) -> RunResult:
        """Run a command in a fresh sandbox. Raises: SpecError, WorldError when the sandbox itself does not start."""
        job = encode_job(request, landlock=self.landlock)
        self._serial += 1
        group = self.cgroups.create(f"{os.getpid()}-{slot}-{self._serial}", request.limits)
        try:
            return await self._run_in(group, request.limits, job, request.stdin, slot)
        finally:
            await asyncio.to_thread(group.kill)
            self.reaper.reap()
            await asyncio.to_thread(group.remove)

    async def _run_in(self, group: Group, limits: RunLimits, job: bytes, stdin: bytes, slot: int) -> RunResult:
        report_read, report_write = os.pipe()
        descriptors = [_memory_file("seccomp", self.program), _memory_file("job", job), report_write]
        started = time.monotonic()
        try:
            with self.reaper.starting():
                process = await asyncio.create_subprocess_exec(
                    *self._argv(limits, *descriptors),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=self._environment(),
                    pass_fds=descriptors,
                    preexec_fn=self._before_exec(group, limits, slot),
                    cwd="/",
                )
                self.reaper.own(process.pid)
        except (OSError, subprocess.SubprocessError) as error:
            os.close(report_read)
            raise WorldError(f"the sandbox does not start: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            return await _Attendance(process, group, limits, started).attend(stdin, report_read)
        finally:
            self.reaper.disown(process.pid)

    def _environment(self) -> dict[str, str]:
        """All that bubblewrap itself gets: its first process inside keeps it to be read."""
        return {"LD_LIBRARY_PATH": str(self.runtime.bwrap_libs)} if self.runtime.bwrap_libs else {}

    def _argv(self, limits: RunLimits, seccomp_fd: int, job_fd: int, report_fd: int) -> list[str]:
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
        argv += ["--remount-ro", "/", "--chdir", "/work", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
        argv += ["--seccomp", str(seccomp_fd), "--"]
        return [*argv, "/python/bin/python3", "-I", "-S", "-c", _ENTER, str(job_fd), str(report_fd)]

    def _before_exec(self, group: Group, limits: RunLimits, slot: int) -> Callable[[], None]:
        """What the child does between fork and exec: the cgroup first, so that nothing of it is ever outside."""
        uid = None if self.first_uid is None else self.first_uid + slot
        bounds = _rlimits(limits, own_user=uid is not None)

        def before_exec() -> None:
            group.join()
            for kind, (soft, hard) in bounds:
                resource.setrlimit(kind, (soft, hard))
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)

        return before_exec


@dataclass
class _Attendance:
    """Watches one started sandbox to its end."""

    process: asyncio.subprocess.Process
    group: Group
    limits: RunLimits
    started: float
    overflowed: asyncio.Event = field(default_factory=asyncio.Event)

    async def attend(self, stdin: bytes, report_fd: int) -> RunResult:
        """Feed, read, wait, kill. Raises: WorldError when the sandbox was never entered."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        report_stream = await _open_pipe(report_fd)
        feeding = asyncio.create_task(_feed(self.process.stdin, stdin))
        cap = self.limits.artifact_bytes + _HEADER_BYTES
        reading = [
            asyncio.create_task(self._read(self.process.stdout, self.limits.output_bytes)),
            asyncio.create_task(self._read(self.process.stderr, self.limits.output_bytes)),
            asyncio.create_task(self._read(report_stream, cap)),
        ]
        try:
            timed_out = await self._wait_for_end()
        finally:
            feeding.cancel()
            await asyncio.to_thread(self.group.kill)
            await self.process.wait()
        wall_s = time.monotonic() - self.started
        stdout, stderr, report = await asyncio.gather(*reading)
        return self._result(stdout, stderr, report, timed_out=timed_out, wall_s=wall_s)

    async def _wait_for_end(self) -> bool:
        """Until it ends, overflows or its time is up. Returns whether the time was up."""
        ends = {asyncio.create_task(self.process.wait()), asyncio.create_task(self.overflowed.wait())}
        done, pending = await asyncio.wait(ends, timeout=self.limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return not done

    async def _read(self, stream: asyncio.StreamReader, cap: int) -> bytes:
        """At most `cap` bytes; more end the run."""
        kept = bytearray()
        while chunk := await stream.read(65536):
            room = cap - len(kept)
            kept += chunk[:room]
            if len(chunk) > room:
                self.overflowed.set()
        return bytes(kept)

    def _result(self, stdout: bytes, stderr: bytes, report: bytes, *, timed_out: bool, wall_s: float) -> RunResult:
        oom = self.group.oom_kills() > 0
        ready, _, rest = report.partition(b"\n")
        if ready != b"ready" and not (oom or timed_out):
            reason = stderr.decode(errors="replace").strip()[-500:]
            raise WorldError(f"the sandbox does not start: {reason or self.process.returncode}")
        status, artifacts, refused = read_report(rest, self.limits)
        outcome = outcome_of(status, oom=oom, timed_out=timed_out, overflowed=self.overflowed.is_set())
        return RunResult(
            outcome=outcome,
            exit_code=status,
            stdout=stdout,
            stderr=stderr,
            wall_s=wall_s,
            artifacts=artifacts if outcome is Outcome.OK else {},
            artifacts_refused=refused if outcome is Outcome.OK else "the run did not end by itself",
        )


def _rlimits(limits: RunLimits, *, own_user: bool) -> list[tuple[int, tuple[int, int]]]:
    bounds = [
        (resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1)),
        (resource.RLIMIT_FSIZE, (limits.disk_bytes, limits.disk_bytes)),
        (resource.RLIMIT_NOFILE, (256, 256)),
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_MSGQUEUE, (0, 0)),
        (resource.RLIMIT_MEMLOCK, (0, 0)),
        (resource.RLIMIT_STACK, (8 << 20, 8 << 20)),
    ]
    if own_user:  # counted per user: an ordinary user has processes of their own
        bounds.append((resource.RLIMIT_NPROC, (limits.pids + 8, limits.pids + 8)))
    return bounds


def _memory_file(name: str, content: bytes) -> int:
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def _open_pipe(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
        stream.close()
