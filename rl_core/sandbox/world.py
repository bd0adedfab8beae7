"""One sandbox from its start to its end: it waits for a job, runs it, is killed by its cgroup, and is used once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

from rl_core.errors import WorldError
from rl_core.sandbox.cgroups import KILL_S, Group, RunStuck
from rl_core.sandbox.job import Report, outcome_of, read_report
from rl_core.sandbox.protocol import Outcome, RunRequest, RunResult
from rl_core.sandbox.snapshots import Snapshot
from rl_core.sandbox.streams import Feed, Stream

_READY = b"ready\n"
_HEADER_BYTES = 4 * 1024 * 1024  # names of all the files that a report may name
_EARLY_BYTES = 4096  # of what bubblewrap says before there is a job
_KILL_AGAIN_S = 0.001


class World:
    """A started sandbox."""

    def __init__(
        self,
        group: Group,
        control: socket.socket,
        standard: tuple[int | None, int, int],
        give_back: Callable[[], None],
    ) -> None:
        """`standard` are our ends of its standard streams. `give_back` is called when nothing of it is left.

        Without a standard input, the job, the input and the snapshot go through `control` as bytes.
        """
        self._group, self._give_back = group, give_back
        self._over = asyncio.Event()
        self.overflowed = self.used = False
        stdin, stdout, stderr = standard
        self._by_descriptors = stdin is not None
        self._stdin = Feed(os.dup(control.fileno()) if stdin is None else stdin)
        self._stdout = Stream(stdout, _EARLY_BYTES, on_overflow=self._overflow)
        self._stderr = Stream(stderr, _EARLY_BYTES, on_overflow=self._overflow)
        self._report = Stream(control.detach(), _EARLY_BYTES, on_overflow=self._overflow, on_end=self._over.set)

    @property
    def alive(self) -> bool:
        """Whether it still waits for a job or runs one."""
        return not self._over.is_set()

    def tell(self, data: bytes) -> None:
        """Send something before the job, which fits the socket."""
        os.write(self._report.descriptor, data)

    async def ready(self) -> None:
        """Wait until it waits for its job. Raises: WorldError when it does not start."""
        while not self._report.data.startswith(_READY):
            if self._over.is_set():
                raise self._not_started()
            await asyncio.sleep(0.002)

    async def run(self, request: RunRequest, job: bytes, base: Snapshot | None) -> RunResult:
        """Run its one job, which encodes the request. Raises: WorldError when the sandbox was never entered."""
        if self.used:
            raise RuntimeError("a world runs one job")
        self.used = True
        started = time.monotonic()
        limits = request.limits
        self._stdout.cap = self._stderr.cap = limits.output_bytes
        self._report.cap = limits.artifact_bytes + (limits.layer_bytes if request.has_tree else 0) + _HEADER_BYTES
        if self._by_descriptors:
            self._send(job, base)
            self._stdin.write(request.stdin)
        else:
            blob = os.pread(base.descriptor, os.fstat(base.descriptor).st_size, 0) if base else b""
            self._stdin.write(b"".join(part for each in (job, request.stdin, blob) for part in (_size(each), each)))
        timed_out = False
        try:
            await asyncio.wait_for(self._over.wait(), limits.wall_s)
        except TimeoutError:
            timed_out = True
        told = self._told(request, base)
        if told.status is None:  # else the supervisor has killed all that could write, and what they wrote is there
            await self._die()
            await asyncio.gather(self._stdout.ended, self._stderr.ended, self._report.ended)
            told = self._told(request, base)
        self._stdout.drain()
        self._stderr.drain()
        return self._result(request, told, timed_out=timed_out, wall_s=time.monotonic() - started)

    async def close(self) -> None:
        """Leave nothing of it. Raises: RunStuck, and its user is never given out again."""
        await self._die()
        deadline = time.monotonic() + KILL_S
        while not self._group.remove():
            if time.monotonic() > deadline:
                raise RunStuck("the cgroup of a run is never empty")
            await asyncio.sleep(_KILL_AGAIN_S)
        self._close_streams()
        self._give_back()

    def forget(self) -> None:
        """Leave nothing of one in which nothing was started."""
        self._group.remove()
        self._close_streams()

    def _close_streams(self) -> None:
        for stream in (self._stdin, self._stdout, self._stderr, self._report):
            stream.close()

    async def _die(self) -> None:
        deadline = time.monotonic() + KILL_S
        while not self._group.kill():
            if time.monotonic() > deadline:
                raise RunStuck("processes of a run do not die")
            await asyncio.sleep(_KILL_AGAIN_S)

    def _overflow(self) -> None:
        self.overflowed = True
        self._over.set()

    def _send(self, job: bytes, base: Snapshot | None) -> None:
        """The job and the snapshot as descriptors: neither is copied through the socket."""
        descriptor = os.memfd_create("job")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(job)
            os.lseek(descriptor, 0, os.SEEK_SET)
            control = socket.socket(fileno=self._report.descriptor)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended before: the report says so
                socket.send_fds(control, [b"j"], [descriptor, *([base.descriptor] if base else [])])
            control.detach()
        finally:
            os.close(descriptor)

    def _not_started(self) -> WorldError:
        return WorldError(f"the sandbox does not start: {self._stderr.data.decode(errors='replace').strip()[-500:]}")

    def _told(self, request: RunRequest, base: Snapshot | None) -> Report:
        return read_report(bytes(self._report.data[len(_READY) :]), request.limits, request.layer or {}, base)

    def _result(self, request: RunRequest, told: Report, *, timed_out: bool, wall_s: float) -> RunResult:
        oom = self._group.oom_kills() > 0
        if not self._report.data.startswith(_READY) and not (oom or timed_out):
            raise self._not_started()
        outcome = outcome_of(told, oom=oom, timed_out=timed_out, overflowed=self.overflowed)
        cut_off = "" if outcome is Outcome.OK else "the run did not end by itself"
        layer_refused = cut_off if timed_out or self.overflowed else told.layer_refused
        return RunResult(
            outcome=outcome,
            exit_code=told.status,
            stdout=bytes(self._stdout.data),
            stderr=bytes(self._stderr.data) + told.problem.encode(),
            wall_s=wall_s,
            artifacts={} if cut_off else told.artifacts,
            artifacts_refused=cut_off or told.refused,
            layer=told.changes if request.has_tree and not layer_refused else None,
            layer_refused=layer_refused if request.has_tree else "",
        )


def _size(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little")
