"""Keeps processes running: circus does the work; we add a growing pause between restarts and a clean end.

Every started process is recorded in `run/processes.json`, so that the next start can end what a killed supervisor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

import msgspec
import psutil
from circus.arbiter import Arbiter
from circus.exc import ConflictError
from circus.process import DEAD_OR_ZOMBIE, UNEXISTING
from circus.watcher import Watcher
from tornado import gen, ioloop

from controlplane.processes.output import LineStream, Say
from controlplane.processes.records import ProcessRecord, process_alive, write_atomically
from controlplane.processes.specs import ProcessSpec

_PAUSE_MIN_S = 0.5
_PAUSE_MAX_S = 30.0
_HEALTHY_AFTER_S = 30.0
_BARE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class PatientArbiter(Arbiter):  # type: ignore[misc]  # circus has no types
    """An arbiter whose periodic look waits for its next turn while a command is under way, without a word."""

    @gen.coroutine
    def manage_watchers(self) -> Any:
        """Reap what ended and spawn what is missing."""
        with contextlib.suppress(ConflictError):
            yield super().manage_watchers()


class PatientWatcher(Watcher):  # type: ignore[misc]  # circus has no types
    """A watcher that restarts at once after a long life and waits longer after each short one."""

    def __init__(self, *args: Any, on_change: Callable[[], None], stream: LineStream, **options: Any) -> None:
        self._on_change = on_change
        self._line = stream.line
        self._stream_end = stream.close
        self._spawned_at = float("-inf")
        self._pause_s = _PAUSE_MIN_S / 2
        super().__init__(*args, stdout_stream={"stream": stream}, stderr_stream={"stream": stream}, **options)
        self.hooks["after_reap"] = self._reaped

    @gen.coroutine
    def spawn_processes(self) -> Any:
        """Spawn what is missing, unless the pause since the last spawn is not over."""
        lived_s = time.monotonic() - self._spawned_at
        if lived_s < self._pause_s:
            return
        self._pause_s = next_pause_s(self._pause_s, lived_s=lived_s)
        self._spawned_at = time.monotonic()
        yield super().spawn_processes()
        self._on_change()

    @gen.coroutine
    def manage_processes(self) -> Any:
        """Reap first: circus forgets a process that it finds dead here without saying how it ended."""
        for process in list(self.processes.values()):
            if process.status in (DEAD_OR_ZOMBIE, UNEXISTING):
                self.reap_process(process.pid)
        yield super().manage_processes()

    def reap_process(self, pid: int, status: int | None = None) -> None:
        """Take the last words and let go of the pipes, then reap.

        Circus closes the pipes of a process that died without telling the event loop. Their numbers are then given to
        the next process, whose output nobody would read, until it blocks on a full pipe.
        """
        process = self.processes.get(pid)
        if process is not None and self.stream_redirector is not None:
            pipes = self.stream_redirector.get_process_pipes(process)
            for name, pipe in [(name, pipe) for name, pipe in pipes if not pipe.closed]:
                for piece in _rest_of(pipe):
                    self.stream_redirector.redirect[name]({"data": piece})
            self.stream_redirector.remove_redirections(process)
        super().reap_process(pid, status)

    def _reaped(self, *, exit_code: int | None = None, **_: Any) -> bool:
        if not self.is_stopping() and not self.is_stopped():
            lived_s = time.monotonic() - self._spawned_at
            self._line(f"ended with {describe_exit(exit_code)} after {lived_s:.0f} s; it is started again")
        return True


def _rest_of(pipe: IO[bytes]) -> Iterator[bytes]:
    """What a dead process still has in its pipe. Its children may hold the other end, so nothing is waited for."""
    os.set_blocking(pipe.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(pipe.fileno(), 65536):
            yield piece


def next_pause_s(pause_s: float, *, lived_s: float) -> float:
    """The least time from one start to the next: doubled after a short life, back to the least after a long one."""
    return _PAUSE_MIN_S if lived_s > _HEALTHY_AFTER_S else min(_PAUSE_MAX_S, pause_s * 2)


def describe_exit(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "an unknown status"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Supervisor:
    """Runs specs until it is told to stop. One per state folder; the caller holds the lock."""

    def __init__(self, runtime: Path, *, logs: Path, working_dir: Path, terminal: TextIO | None, say: Say) -> None:
        """`terminal` gets the processes' lines, `say` a few lines about the whole."""
        self._runtime = runtime
        self._logs = logs
        self._working_dir = working_dir
        self._terminal = terminal
        self._say = say
        self._records = runtime / "processes.json"
        self._arbiter: Any = None
        self._stop = asyncio.Event()

    async def run(
        self,
        specs: Sequence[ProcessSpec],
        *,
        started: Callable[[], None] = lambda: None,
        poll: Callable[[], Sequence[ProcessSpec]] | None = None,
        poll_s: float = 5.0,
        parent: int | None = None,
    ) -> None:
        """Run until SIGINT, SIGTERM or, where given, the end of the `parent` process.

        `poll` is asked now and then, in a thread, which further processes should run; new names are started.
        """
        self.end_leftovers()
        circus = f"ipc://{self._runtime / 'circus.sock'}", f"ipc://{self._runtime / 'circus-events.sock'}"
        watchers = [self._watcher(spec) for spec in specs]
        logging.getLogger("circus").setLevel(logging.ERROR)
        self._arbiter = PatientArbiter(watchers, *circus, check_delay=0.5, loop=ioloop.IOLoop.current())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        await _alone(self._arbiter.start)
        started()
        try:
            await self._until_stopped(poll, poll_s, parent)
        finally:
            await self._end()

    def end_leftovers(self) -> list[str]:
        """End what a supervisor that was killed left running; returns the names."""
        ended = []
        for name, record in self._read_records().items():
            process = process_alive(record.pid, born=record.born, name="")
            if process is not None:
                end_tree([process, *_children(process)])
                ended.append(name)
        if ended:
            self._say(f"ended what an earlier run left: {', '.join(ended)}")
        self._records.unlink(missing_ok=True)
        return ended

    def _watcher(self, spec: ProcessSpec) -> PatientWatcher:
        return PatientWatcher(
            spec.name,
            spec.argv[0],
            args=list(spec.argv[1:]),
            working_dir=str(self._working_dir),
            copy_env=not spec.bare,
            env={**_BARE_ENV, **spec.env} if spec.bare else spec.env,
            stop_signal=spec.stop_signal,
            graceful_timeout=spec.grace_s,
            priority=spec.priority,
            max_retry=1,
            on_change=self._record,
            stream=LineStream(spec.name, folder=self._logs, terminal=self._terminal),
        )

    async def _until_stopped(
        self, poll: Callable[[], Sequence[ProcessSpec]] | None, poll_s: float, parent: int | None
    ) -> None:
        next_poll = time.monotonic() + poll_s
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), timeout=0.5)
            if parent is not None and os.getppid() != parent:
                self._say("the process that started this one is gone; stopping")
                return
            if poll is not None and time.monotonic() >= next_poll:
                for spec in await asyncio.to_thread(poll):
                    await self._add(spec)
                next_poll = time.monotonic() + poll_s

    async def _add(self, spec: ProcessSpec) -> None:
        watcher = self._watcher(spec)
        watcher.initialize(self._arbiter.evpub_socket, self._arbiter.sockets, self._arbiter)
        self._arbiter.watchers.append(watcher)
        self._arbiter._watchers_names[watcher.name.lower()] = watcher
        await _alone(watcher.start)

    async def _end(self) -> None:
        tree = _children(psutil.Process())
        self._arbiter.ctrl.caller.stop()  # no restarts from here on
        try:
            await _alone(self._arbiter.stop)
        except ConflictError:
            self._say("the supervisor is stuck; ending its processes all the same")
        # Children of children, such as forks of a worker that had to be killed.
        await asyncio.to_thread(end_tree, [process for process in tree if process.is_running()])
        self._records.unlink(missing_ok=True)

    def _record(self) -> None:
        records = {}
        for watcher in self._arbiter.watchers if self._arbiter else ():
            for pid in watcher.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    records[watcher.name] = ProcessRecord(pid, psutil.Process(pid).create_time())
        write_atomically(self._records, msgspec.json.encode(records))

    def _read_records(self) -> dict[str, ProcessRecord]:
        return supervised(self._runtime)


def supervised(runtime: Path) -> dict[str, ProcessRecord]:
    """The processes that the supervisor of this folder started last, by name."""
    try:
        return msgspec.json.decode((runtime / "processes.json").read_bytes(), type=dict[str, ProcessRecord])
    except (OSError, msgspec.MsgspecError):
        return {}


def end_tree(processes: Sequence[psutil.Process], *, patience_s: float = 5.0) -> None:
    """Ask processes to end, then kill those that do not."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=patience_s)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


async def _alone(command: Callable[[], Awaitable[Any] | None], *, patience_s: float = 60.0) -> None:
    """Run a command of circus, which refuses one while another is under way."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            future = command()
        except ConflictError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
            continue
        if future is not None:
            await future
        return
