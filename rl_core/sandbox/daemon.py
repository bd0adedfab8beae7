"""sandboxd's HTTP service over a unix socket."""

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
from rl_core.sandbox.job import encode_job
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.layers import Layer, LayerState
from rl_core.sandbox.pool import Pool
from rl_core.sandbox.protocol import RunRequest, SnapshotMissing
from rl_core.sandbox.snapshots import SnapshotsFull, SnapshotStore
from rl_core.sandbox.trees import MAX_TREE_BYTES
from rl_core.sandbox.turns import SandboxBusy, Turns

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 128 * 1024 * 1024
MAX_QUEUED_BYTES = 2 * MAX_BODY_BYTES
_SOCKET_PATH_BYTES = 107


def build_app(service: Sandboxd) -> Starlette:
    """The service. `POST /v1/run` takes and gives MessagePack, `POST /v1/snapshots` takes a blob; the rest is JSON."""
    return Starlette(
        routes=[
            Route("/v1/run", service.run, methods=["POST"]),
            Route("/v1/snapshots", service.freeze, methods=["POST"]),
            Route("/v1/snapshots/{name}", service.snapshot),
            Route("/v1/health", service.health),
        ],
        exception_handlers={
            msgspec.DecodeError: _refuse,
            SpecError: _refuse,
            SnapshotMissing: _refuse,
            SandboxBusy: _refuse,
            SnapshotsFull: _refuse,
            WorldError: _fail,
            OSError: _fail,
        },
        lifespan=service.lifespan,
    )


class Sandboxd:
    """What sandboxd does for whom asks."""

    def __init__(
        self,
        launcher: Launcher,
        states: list[LayerState],
        snapshots: SnapshotStore,
        *,
        slots: int,
        ahead: int,
        max_queued: int,
    ) -> None:
        """`slots` runs at once, `ahead` worlds started before they are asked for."""
        self._launcher, self._states, self._snapshots = launcher, states, snapshots
        self._backend = "runsc" if any(state.layer is Layer.OWN_KERNEL for state in states) else "bubblewrap"
        self._turns = Turns(slots, max_queued=max_queued, max_queued_bytes=MAX_QUEUED_BYTES)
        self._pool = Pool(launcher, ahead=ahead, idle=lambda: self._turns.idle)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Keep the pool filled while serving."""
        filling = asyncio.create_task(self._pool.keep_filled())
        try:
            yield
        finally:
            filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await filling

    async def run(self, http: Request) -> Response:
        """Run a command in a world of its own."""
        body = await _body(http, MAX_BODY_BYTES)
        request, size = msgspec.msgpack.decode(body, type=RunRequest), len(body)
        del body  # it may wait for long, and the request has its own
        with self._snapshots.use(request.base) if request.base else contextlib.nullcontext() as base:
            job = encode_job(request, base)
            async with self._turns.one(request.client, size), self._pool.one(request.limits) as world:
                result = await world.run(request, job, base)
        log.info(
            "sandbox_run",
            outcome=result.outcome.value,
            exit_code=result.exit_code,
            wall_s=round(result.wall_s, 3),
            client=request.client[:64],
        )
        return Response(msgspec.msgpack.encode(result), media_type="application/msgpack")

    async def freeze(self, http: Request) -> Response:
        """Keep a snapshot."""
        name = await asyncio.to_thread(self._snapshots.freeze, await _body(http, MAX_TREE_BYTES))
        return JSONResponse({"base": name})

    async def snapshot(self, http: Request) -> Response:
        """Whether a snapshot is kept."""
        return JSONResponse({"kept": self._snapshots.has(http.path_params["name"])})

    async def health(self, http: Request) -> Response:
        """Layers, and how many runs go on, wait, and how many worlds wait for a run."""
        return JSONResponse(
            {
                "layers": {state.layer.value: state.present for state in self._states},
                "backend": self._backend,
                "slots": self._turns.at_once,
                "running": self._turns.running,
                "queued": self._turns.queued,
                "ahead": self._pool.waiting,
                "started": self._launcher.started,
            }
        )


async def _refuse(http: Request, error: Exception) -> Response:
    """Answer what the asker can do something about."""
    if isinstance(error, SnapshotMissing):
        return _problem(404, error)
    if isinstance(error, SandboxBusy):
        return _problem(429, error)
    if isinstance(error, SnapshotsFull):
        return _problem(507, error)
    return _problem(400, error if isinstance(error, SpecError) else SpecError(f"not a run request: {error}"))


async def _fail(http: Request, error: Exception) -> Response:
    """Answer what went wrong here."""
    log.error("sandbox_run_failed", error=str(error), exc_info=error)
    return _problem(503, error if isinstance(error, WorldError) else WorldError(str(error)))


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
    listener.listen(4096)
    return listener


async def _body(http: Request, most: int) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > most:
            raise SpecError(f"the request is larger than {most} bytes")
    return bytes(body)


def _problem(status: int, error: RlCoreError) -> Response:
    return JSONResponse({"code": error.code, "detail": str(error), "retryable": error.retryable}, status_code=status)
