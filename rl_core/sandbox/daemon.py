"""sandboxd's HTTP service over a unix socket: a fixed number of slots, a bounded queue, first come first served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_core.errors import RlCoreError, SandboxRefused, SpecError, WorldError
from rl_core.sandbox.cgroups import RunStuck
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.layers import LayerState
from rl_core.sandbox.protocol import RunRequest, RunResult

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
_SOCKET_PATH_BYTES = 107


class SandboxBusy(WorldError):
    """Every slot is taken and the queue is full (HTTP 429)."""

    code = "sandbox_busy"


class Slots:
    """Hands out slots in the order asked. A slot is a user of its own: never two runs at once."""

    def __init__(self, count: int, max_queued: int) -> None:
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(count):
            self._free.put_nowait(slot)
        self._max_queued = max_queued
        self.count, self.queued = count, 0

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return self.count - self._free.qsize()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[int]:
        """Wait for a slot. Raises: SandboxBusy when too many wait already."""
        if self.queued >= self._max_queued:
            raise SandboxBusy(f"{self.queued} runs are waiting already; try again later")
        self.queued += 1
        try:
            slot = await self._free.get()
        finally:
            self.queued -= 1
        try:
            yield slot
        except RunStuck:
            log.exception("sandbox_slot_lost", slot=slot)
            raise
        except BaseException:
            self._free.put_nowait(slot)
            raise
        else:
            self._free.put_nowait(slot)


def build_app(launcher: Launcher, states: list[LayerState], *, slots: int, max_queued: int) -> Starlette:
    """The service. `POST /v1/run` takes and gives MessagePack; `GET /v1/health` is JSON."""
    pool = Slots(slots, max_queued)

    async def run(http: Request) -> Response:
        try:
            request = msgspec.msgpack.decode(await _body(http), type=RunRequest)
            async with pool.one() as slot:
                result = await launcher.run(request, slot=slot)
        except msgspec.DecodeError as error:
            return _problem(400, SpecError(f"not a run request: {error}"))
        except SpecError as error:
            return _problem(400, error)
        except SandboxBusy as error:
            return _problem(429, error)
        except (WorldError, OSError) as error:
            log.exception("sandbox_run_failed", error=str(error))
            return _problem(503, error if isinstance(error, WorldError) else WorldError(str(error)))
        _log_run(result)
        return Response(msgspec.msgpack.encode(result), media_type="application/msgpack")

    async def health(http: Request) -> Response:
        layers = {state.layer.value: state.present for state in states}
        return JSONResponse({"layers": layers, "slots": slots, "running": pool.running, "queued": pool.queued})

    return Starlette(routes=[Route("/v1/run", run, methods=["POST"]), Route("/v1/health", health)])


def open_socket(path: Path) -> socket.socket:
    """Listen on a unix socket that only this user and group may use. Raises: SandboxRefused when it is taken."""
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise SandboxRefused(f"the socket path {path} is longer than {_SOCKET_PATH_BYTES} bytes; choose a shorter one")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # left behind by a sandboxd that was killed
            else:
                raise SandboxRefused(f"another sandboxd answers on {path}; stop it, or choose another --socket")
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise SandboxRefused(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    listener.listen(512)
    return listener


async def _body(http: Request) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise SpecError(f"the request is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _problem(status: int, error: RlCoreError) -> Response:
    return JSONResponse({"code": error.code, "detail": str(error), "retryable": error.retryable}, status_code=status)


def _log_run(result: RunResult) -> None:
    log.info(
        "sandbox_run",
        outcome=result.outcome.value,
        exit_code=result.exit_code,
        wall_s=round(result.wall_s, 3),
        artifacts=len(result.artifacts),
    )
