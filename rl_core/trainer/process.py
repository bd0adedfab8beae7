"""The resident trainer process: JSON lines in, JSON lines out, one run at a time.

It ends when its parent does: the kernel is asked to kill it (Linux), and a thread watches standard input close.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from rl_core.errors import RlCoreError, TrainerError, TrainerLost
from rl_core.trainer.messages import (
    CheckpointRequest,
    CloseRequest,
    ExportRequest,
    OpenRequest,
    PositionRequest,
    Request,
    StepRequest,
)
from rl_core.trainer.session import Session

PR_SET_PDEATHSIG = 1
EXIT_BUG = 70

log = logging.getLogger(__name__)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started us ends; leave at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def watch_requests(source: int) -> queue.SimpleQueue[bytes]:
    """Lines of a descriptor, read ahead by a thread that ends the process when it closes, in the middle of a step too.

    The descriptor and not a buffered file: a file's lock, held by a thread that waits, makes Python abort at its end.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        rest = b""
        while chunk := os.read(source, 1 << 20):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return lines


class Server:
    """Answers requests, one after another."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._session: Session | None = None

    def serve(self, lines: queue.SimpleQueue[bytes]) -> int:
        """Answer until closed; the exit code. A bug ends the process: the state it left is not to be trusted."""
        while True:
            try:
                request = _parse(lines.get())
                if isinstance(request, CloseRequest):
                    self._answer({"result": {}})
                    return 0
                self._answer({"result": self._run(request)})
            except RlCoreError as error:
                log.info("event=request_failed code=%s message=%r", error.code, str(error))
                self._answer({"error": _describe(error)})
            except Exception as error:
                log.exception("event=trainer_bug")
                bug = TrainerLost(f"the trainer met an unexpected {type(error).__name__}: {error}; see its log")
                self._answer({"error": _describe(bug)})
                return EXIT_BUG

    def _run(self, request: Request) -> dict[str, Any]:
        if isinstance(request, OpenRequest):
            self._session = None  # before loading: two models at once might not fit
            self._session = Session(request)
            return self._session.describe()
        if self._session is None:
            raise TrainerLost("no run is open in this trainer; open one first")
        if isinstance(request, StepRequest):
            return self._session.step(request, self._progress)
        if isinstance(request, CheckpointRequest):
            return self._session.checkpoint(fence=request.fence)
        if isinstance(request, ExportRequest):
            return self._session.export(folder=request.folder)
        if isinstance(request, PositionRequest):
            return {}
        raise TrainerError(f"cannot answer {type(request).__name__}")

    def _progress(self, progress: dict[str, Any]) -> None:
        self._write({"progress": progress})

    def _answer(self, answer: dict[str, Any]) -> None:
        position = None if self._session is None else msgspec.to_builtins(self._session.position)
        self._write(answer | {"position": position})

    def _write(self, data: dict[str, Any]) -> None:
        self._out.write(msgspec.json.encode(data) + b"\n")
        self._out.flush()


def _parse(line: bytes) -> Request:
    try:
        return msgspec.json.decode(line, type=Request)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise TrainerError(f"the request is not valid: {error}") from error


def _describe(error: RlCoreError) -> dict[str, Any]:
    return {"code": error.code, "message": str(error), "retryable": error.retryable}
