"""The embedded engine over HTTP: an inference listener and a control listener in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from rl_core.chat import ChatTokenizer
from rl_core.delta import weights_root
from rl_core.engines.control_api import ControlApi
from rl_core.engines.engine import Engine
from rl_core.engines.generate_api import GenerateApi
from rl_core.engines.http import BearerAuth, on_core_error, on_disconnect, on_http_error
from rl_core.engines.openai_api import OpenAiApi
from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.reconciler import SlotReconciler
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.errors import RlCoreError
from rl_core.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server process is set up. `store` None: it takes no targets."""

    model: Path
    name: str
    inference_token: str
    control_token: str
    store: str | None = None
    slots: tuple[str, ...] = ("default",)
    dtype: ComputeDtype = ComputeDtype.AUTO
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)


def _app(routes: list[Route], token: str, *, public: frozenset[str] = frozenset()) -> Starlette:
    return Starlette(
        routes=routes,
        middleware=[Middleware(BearerAuth, token=token, public=public)],
        exception_handlers={
            RlCoreError: on_core_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
        },
    )


class EngineServer:
    """An engine with its two applications. Raises: ModelError, SpecError, StoreError."""

    def __init__(self, options: ServerOptions) -> None:
        tokenizer = ChatTokenizer.load(options.model)
        _ = tokenizer.token_strings  # built now, not in the first request
        self.engine = Engine.load(
            options.model, codec=tokenizer, limits=options.limits, dtype=options.dtype, slots=options.slots
        )
        self._reconcilers = self._make_reconcilers(options)
        openai = OpenAiApi(self.engine, tokenizer, name=options.name)
        control = ControlApi(self.engine, self._reconcilers, name=options.name)
        self.inference_app: ASGIApp = _app(
            [
                Route("/v1/models", openai.models, methods=["GET"]),
                Route("/v1/chat/completions", openai.chat, methods=["POST"]),
                Route("/v1/completions", openai.completions, methods=["POST"]),
                Route("/v1/generate", GenerateApi(self.engine).generate, methods=["POST"]),
            ],
            options.inference_token,
        )
        self.control_app: ASGIApp = _app(
            [
                Route("/control/target", control.target, methods=["POST"]),
                Route("/control/version", control.version, methods=["GET"]),
                Route("/control/pause", control.pause, methods=["POST"]),
                Route("/control/resume", control.resume, methods=["POST"]),
                Route("/control/health", control.health, methods=["GET"]),
                Route("/control/metrics", control.metrics, methods=["GET"]),
                Route("/metrics", control.prometheus, methods=["GET"]),
            ],
            options.control_token,
        )

    def close(self) -> None:
        """End every thread."""
        for reconciler in self._reconcilers.values():
            reconciler.close()
        self.engine.close()

    def _make_reconcilers(self, options: ServerOptions) -> dict[str, SlotReconciler]:
        if options.store is None:
            return {}
        store = open_store(options.store)
        root = weights_root(self.engine.tensors(options.slots[0]))
        return {slot: SlotReconciler(self.engine, slot, store=store, root=root) for slot in options.slots}


class _Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to the process: there are two of them in it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(server: EngineServer, inference: socket.socket, control: socket.socket) -> None:
    """Serve both applications until SIGTERM or SIGINT, then abort what is in flight and return."""
    listeners = [_Listener(_uvicorn_config(app)) for app in (server.inference_app, server.control_app)]
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    tasks = [
        asyncio.ensure_future(listener.serve(sockets=[sock]))
        for listener, sock in zip(listeners, (inference, control), strict=True)
    ]
    signalled = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({signalled, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    # Ending the engine first answers every open call, so that the listeners have nothing to wait for.
    await asyncio.to_thread(server.close)
    for listener in listeners:
        listener.should_exit = True
    await asyncio.gather(*tasks)
    signalled.cancel()


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5, ws="none",
        server_header=False,
    )  # fmt: skip
