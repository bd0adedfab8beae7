"""Two listeners of one engine process, each behind a token of its own. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from rl_core.engines.control_api import ControlApi
from rl_core.engines.http import BearerAuth, on_core_error, on_disconnect, on_http_error
from rl_core.errors import RlCoreError


def application(routes: list[Route], token: str, *, by_prefix: Mapping[str, str] | None = None) -> Starlette:
    """An application that lets calls with `token` through and answers errors in OpenAI's shape.

    `by_prefix` names paths that ask for a token of their own.
    """
    return Starlette(
        routes=routes,
        middleware=[Middleware(BearerAuth, token=token, by_prefix=by_prefix)],
        exception_handlers={
            RlCoreError: on_core_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
        },
    )


def control_routes(control: ControlApi) -> list[Route]:
    """The control protocol, which is the same for every engine."""
    return [
        Route("/control/target", control.target, methods=["POST"]),
        Route("/control/segments", control.segments, methods=["POST"]),
        Route("/control/version", control.version, methods=["GET"]),
        Route("/control/pause", control.pause, methods=["POST"]),
        Route("/control/resume", control.resume, methods=["POST"]),
        Route("/control/health", control.health, methods=["GET"]),
        Route("/control/metrics", control.metrics, methods=["GET"]),
        Route("/metrics", control.prometheus, methods=["GET"]),
    ]


class _Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to the process: there are two of them in it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_both(
    inference: tuple[ASGIApp, socket.socket],
    control: tuple[ASGIApp, socket.socket],
    *,
    close: Callable[[], None],
    ended: asyncio.Event | None = None,
) -> None:
    """Serve both applications until SIGTERM, SIGINT or `ended`; then `close`, in a thread, and return."""
    listeners = [_Listener(_uvicorn_config(app)) for app, _ in (inference, control)]
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    tasks = [
        asyncio.ensure_future(listener.serve(sockets=[sock]))
        for listener, (_, sock) in zip(listeners, (inference, control), strict=True)
    ]
    waits = [asyncio.ensure_future(event.wait()) for event in (stopping, ended) if event is not None]
    await asyncio.wait({*waits, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    # Ending the engine first answers every open call, so that the listeners have nothing to wait for.
    await asyncio.to_thread(close)
    for listener in listeners:
        listener.should_exit = True
    await asyncio.gather(*tasks)
    for wait in waits:
        wait.cancel()


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5, ws="none",
        server_header=False,
    )  # fmt: skip
