"""The embedded engine over HTTP: an inference listener and a control listener in one process."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.routing import Route
from starlette.types import ASGIApp

from rl_core.chat import ChatTokenizer
from rl_core.delta import weights_root
from rl_core.delta.spool import SPOOL_BYTES
from rl_core.engines.control_api import ControlApi
from rl_core.engines.engine import Engine
from rl_core.engines.generate_api import GenerateApi
from rl_core.engines.listeners import application, control_routes, serve_both
from rl_core.engines.openai_api import OpenAiApi
from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.reconciler import SlotReconciler
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.engines.segments_api import SEGMENTS_PATH, segment_routes
from rl_core.engines.sharing import SegmentSharing
from rl_core.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server process is set up. `store` None: it takes no targets.

    `spool` is the folder of fetched segments, of at most `spool_bytes`; `peer_token` what the replicas of the cluster
    ask of each other for them. `update_threads` decode a version in each slot, and as many hash.
    """

    model: Path
    name: str
    inference_token: str
    control_token: str
    store: str | None = None
    spool: Path | None = None
    spool_bytes: int = SPOOL_BYTES
    peer_token: str | None = None
    update_threads: int = 1
    slots: tuple[str, ...] = ("default",)
    dtype: ComputeDtype = ComputeDtype.AUTO
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)


class EngineServer:
    """An engine with its two applications. Raises: ModelError, SpecError, StoreError."""

    def __init__(self, options: ServerOptions) -> None:
        tokenizer = ChatTokenizer.load(options.model)
        _ = tokenizer.token_strings  # built now, not in the first request
        self.engine = Engine.load(
            options.model, codec=tokenizer, limits=options.limits, dtype=options.dtype, slots=options.slots
        )
        self._sharing = sharing = _sharing(options)
        self._reconcilers = self._make_reconcilers(options, sharing)
        openai = OpenAiApi(self.engine, tokenizer, name=options.name)
        announce = None
        if sharing is not None and options.store is not None:
            announce = partial(sharing.announce, open_store(options.store))
        control = ControlApi(self.engine, self._reconcilers, name=options.name, announce=announce)
        self.inference_app: ASGIApp = application(
            [
                Route("/v1/models", openai.models, methods=["GET"]),
                Route("/v1/chat/completions", openai.chat, methods=["POST"]),
                Route("/v1/completions", openai.completions, methods=["POST"]),
                Route("/v1/generate", GenerateApi(self.engine).generate, methods=["POST"]),
                *([] if sharing is None else segment_routes(sharing)),
            ],
            options.inference_token,
            by_prefix={SEGMENTS_PATH: options.peer_token} if options.peer_token else None,
        )
        self.control_app: ASGIApp = application(
            control_routes(control),
            options.control_token,
        )

    def close(self) -> None:
        """End every thread."""
        for reconciler in self._reconcilers.values():
            reconciler.close()
        if self._sharing is not None:
            self._sharing.ahead.close()
        self.engine.close()

    def _make_reconcilers(self, options: ServerOptions, sharing: SegmentSharing | None) -> dict[str, SlotReconciler]:
        if options.store is None:
            return {}
        store, threads = open_store(options.store), options.update_threads
        root = weights_root(self.engine.tensors(options.slots[0]), threads=threads)
        return {
            slot: SlotReconciler(self.engine, slot, store=store, root=root, sharing=sharing, threads=threads)
            for slot in options.slots
        }


def _sharing(options: ServerOptions) -> SegmentSharing | None:
    if options.spool is None:
        return None
    return SegmentSharing(options.spool, max_bytes=options.spool_bytes, peer_token=options.peer_token)


async def serve(server: EngineServer, inference: socket.socket, control: socket.socket) -> None:
    """Serve both applications until SIGTERM or SIGINT, then abort what is in flight and return."""
    await serve_both((server.inference_app, inference), (server.control_app, control), close=server.close)
