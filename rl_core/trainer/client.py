"""The trainer process as its parent sees it: start it, ask it, lose it. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

from rl_core import errors
from rl_core.errors import RlCoreError, TrainerError, TrainerLost
from rl_core.trainer.messages import Op, Position

DEFAULT_TIMEOUT_S = 900.0
CLOSE_TIMEOUT_S = 10.0

Progress = Callable[[dict[str, Any]], None]

log = logging.getLogger(__name__)


class TrainerProcess:
    """One resident trainer. It dies with the thread that started it, and when its standard input closes.

    Not to be shared between threads: one request is in flight at a time.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._buffer = b""
        self.position: Position | None = None

    @classmethod
    def start(
        cls,
        *,
        python: str = sys.executable,
        threads: int = 1,
        stderr: IO[Any] | int | None = None,
        env: dict[str, str] | None = None,
    ) -> Self:
        """Start the process. `stderr` takes its logs (default: this process's own); `env` replaces the environment.

        Raises: TrainerLost when it cannot be started.
        """
        command = [python, "-m", "rl_core.trainer", "--threads", str(threads), "--parent", str(os.getpid())]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env, bufsize=0
            )
        except OSError as error:
            raise TrainerLost(f"cannot start the trainer process: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def open(
        self, *, timeout_s: float = DEFAULT_TIMEOUT_S, progress: Progress | None = None, **payload: Any
    ) -> Position:
        """Load a run (see `Op.OPEN`); where the trainer then stands. Raises: as `call`."""
        self.call(Op.OPEN, timeout_s=timeout_s, progress=progress, **payload)
        if self.position is None:
            raise TrainerLost("the trainer answered without a position")
        return self.position

    def call(
        self,
        op: Op | str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        progress: Progress | None = None,
        **payload: Any,
    ) -> dict[str, Any]:
        """Ask for one operation and wait for its result.

        Raises: what the trainer raised, by its code (TrainerError, CheckpointError, TrajectoryError, BaseMismatch,
        StoreUnavailable, …); TrainerLost when the process ended or was silent for `timeout_s` (it is killed then).
        Whatever interrupts the wait (a time limit's signal, say) kills it too: the answer that is still to come would
        be taken for that of the next call.
        """
        line = json.dumps({"op": str(op), **payload}).encode() + b"\n"
        try:
            answer = self._ask(line, timeout_s, progress)
        except BaseException:
            self._kill()
            raise
        if "position" in answer and answer["position"] is not None:
            self.position = Position(**answer["position"])
        if "error" in answer:
            raise error_from(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _ask(self, line: bytes, timeout_s: float, progress: Progress | None) -> dict[str, Any]:
        """Send a request; its answer, once all progress has been told. Raises: TrainerLost."""
        try:
            if self._process.stdin is None:
                raise TrainerLost("the trainer process has no standard input")
            self._write(self._process.stdin, line, time.monotonic() + timeout_s)
        except (OSError, ValueError) as error:
            raise self._lost(f"does not read: {error}") from error
        while "progress" in (answer := self._read_answer(time.monotonic() + timeout_s)):
            if progress is not None:
                progress(answer["progress"])
        return answer

    def _write(self, pipe: IO[bytes], line: bytes, deadline: float) -> None:
        """Write as the trainer reads: a line may be longer than a pipe."""
        os.set_blocking(pipe.fileno(), False)
        rest = memoryview(line)
        while rest:
            rest = rest[pipe.write(rest) or 0 :]
            if rest and not self._ready(pipe, selectors.EVENT_WRITE, deadline):
                raise self._lost("did not read in time")

    @staticmethod
    def _ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            return bool(selector.select(max(0.0, deadline - time.monotonic())))

    def _read_answer(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            chunk = self._read_chunk(deadline)
            if not chunk:
                raise self._lost("ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._lost(f"wrote something that is no answer: {line[:80]!r}") from error
        if not isinstance(answer, dict):
            raise self._lost(f"wrote something that is no answer: {line[:80]!r}")
        return answer

    def _read_chunk(self, deadline: float) -> bytes:
        out = self._process.stdout
        if out is None:
            raise self._lost("has no standard output")
        if not self._ready(out, selectors.EVENT_READ, deadline):
            raise self._lost("did not answer in time")
        return os.read(out.fileno(), 1 << 16)

    def _lost(self, what: str) -> TrainerLost:
        """The error for a trainer that is no use any more; makes sure that it is gone."""
        self._kill()
        code = self._process.returncode
        return TrainerLost(f"the trainer process {self.pid} {what} (exit code {code}); rebuild it from a checkpoint")

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def close(self) -> None:
        """End the process: politely, then not. Safe to call twice."""
        if self.alive:
            try:
                self.call(Op.CLOSE, timeout_s=CLOSE_TIMEOUT_S)
                self._process.wait(timeout=CLOSE_TIMEOUT_S)
            except (RlCoreError, subprocess.TimeoutExpired) as error:
                log.info("event=trainer_killed pid=%s reason=%r", self.pid, str(error))
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _classes() -> dict[str, type[RlCoreError]]:
    found = (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RlCoreError))
    return {cls.code: cls for cls in found}


def error_from(data: dict[str, Any]) -> RlCoreError:
    """The error that a trainer's answer names, as an exception of the same class (TrainerError if unknown)."""
    cls = _classes().get(str(data.get("code")), TrainerError)
    return cls(str(data.get("message")))
