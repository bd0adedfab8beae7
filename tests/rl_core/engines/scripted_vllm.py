"""vLLM's HTTP interface over workers that hold a number for weights, and a real sidecar before it.

A token is the step of the version that sampled it; MIXED where the workers do not hold the same, HALF where a load
broke off, STALE where the cache it was sampled over is another version's. So each token tells whether it may be given
at all, and under which name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_factories as make
import httpx
import msgspec
import uvicorn
from engine_process import CONTROL_TOKEN, INFERENCE_TOKEN
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import SlotStatus, TargetBody
from rl_core.engines.vllm.messages import RoutesSource, TransferSource, WorkerState, WorkerStatus, ticket_in
from rl_core.engines.vllm.server import Sidecar, SidecarOptions

STALE, MIXED, HALF = 256, 257, 258  # steps are below
_TOKEN_EVERY_S = 0.01


def version(step: int) -> str:
    return f"a:0-{step}"


def root(step: int) -> str:
    return f"{step:064x}"


@dataclass
class Worker:
    """`keeps`: how many of the next loads leave it with what it has; `breaks`: break off half-way."""

    status: WorkerStatus
    staged: TargetBody | None = None
    keeps: int = 0
    breaks: int = 0

    @property
    def weights(self) -> int:
        return HALF if self.status.damaged else int(self.status.root, 16)

    def load(self, wanted: str) -> None:
        if self.staged is None or self.staged.version != wanted:
            return
        if self.keeps or self.breaks:
            damaged = self.breaks > 0
            self.keeps, self.breaks = max(self.keeps - 1, 0), max(self.breaks - 1, 0)
            self.tell(state=WorkerState.FAILED, error="no memory", damaged=damaged)
        else:
            self.tell(version=wanted, root=self.staged.root, state=WorkerState.IDLE, damaged=False, error=None)
            self.staged = None

    def tell(self, **fields: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **fields)


class _Lost(Response):
    """An answer that never arrives whole: the connection closes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})


@dataclass
class ScriptedVllm:
    """`faults`: for a path or a worker's method, what goes wrong in the next calls, one after another.

    `refused`: an error, and nothing is done. `failed`: an error after it was done. `lost`: done, and no answer.
    """

    workers: list[Worker] = field(default_factory=list)
    label: str = "default"
    paused: bool = False
    cached: int | None = None
    calls: list[str] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)
    drops: list[bool] = field(default_factory=list)  # what the next resets of the cache answer
    sampled: dict[str, int] = field(default_factory=dict)  # by ticket
    aborts: int = 0
    streams: int = 0  # OpenAI's that are open

    @property
    def laid(self) -> bool:
        """Whether faults wait."""
        waiting = any(self.faults.values()) or self.drops
        return bool(waiting or any(worker.keeps or worker.breaks for worker in self.workers))

    @classmethod
    def of(cls, workers: int) -> ScriptedVllm:
        status = WorkerStatus(
            version=None, root=root(0), state=WorkerState.IDLE, swaps=0, attached=True, updating=False,
            damaged=False, poisoned=False, shadow_bytes=1, prefix_caching=True, routes=RoutesSource.NONE,
        )  # fmt: skip
        return cls([Worker(status) for _ in range(workers)])

    def app(self) -> ASGIApp:
        paths = {
            "/health": self._done, "/collective_rpc": self._rpc,
            "/start_weight_update": self._begin, "/update_weights": self._load, "/finish_weight_update": self._finish,
            "/update_weight_version": self._name, "/pause": self._pause, "/resume": self._resume,
            "/reset_prefix_cache": self._drop, "/abort_requests": self._abort,
        }  # fmt: skip
        routes = [Route(path, self._scripted(path, act), methods=["GET", "POST"]) for path, act in paths.items()]
        routes.append(Route("/inference/v1/generate", self._generate, methods=["POST"]))
        routes.append(Route("/v1/chat/completions", self._chat, methods=["POST"]))
        return Starlette(routes=routes)

    def _scripted(self, path: str, act: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            body = json.loads(await request.body() or "{}")
            name = body.get("method", path)
            if path != "/health":
                self.calls.append(name)
            # What workers are asked outside of pauses has none.
            left = self.faults.get(name, []) if self.paused or name == path else []
            fault = left.pop(0) if left else None
            if fault == "refused":
                return JSONResponse({"error": "refused"}, 500)
            result = act(body)
            if fault == "failed":
                return JSONResponse({"error": "it was done, and failed"}, 500)
            return _Lost() if fault == "lost" else JSONResponse(result)

        return answer

    def _done(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _rpc(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["method"] == "slipway_counts":
            return {"results": [json.dumps(self.sampled) for _ in self.workers]}
        if body["method"] == "slipway_prepare":
            target = msgspec.json.decode(body["args"][0], type=TargetBody)
            for worker in self.workers:
                worker.staged = target
                worker.tell(state=WorkerState.STAGED, target=target.version)
        return {"results": [msgspec.json.encode(worker.status).decode() for worker in self.workers]}

    def _begin(self, _: dict[str, Any]) -> dict[str, Any]:
        for worker in self.workers:
            assert not worker.status.updating
            worker.tell(updating=True)
        return {}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.paused
        for worker in self.workers:
            worker.load(body["update_info"]["version"])
        return {}

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        for worker in self.workers:
            assert worker.status.updating
            worker.tell(updating=False)
        self.label = self.label if body["weight_version"] is None else body["weight_version"]
        return {}

    def _name(self, body: dict[str, Any]) -> dict[str, Any]:
        self.label = body["new_version"]
        return {}

    def _pause(self, _: dict[str, Any]) -> dict[str, Any]:
        self.paused = True
        return {}

    def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        self.paused = False
        return {}

    def _drop(self, _: dict[str, Any]) -> dict[str, Any]:
        success = self.drops.pop(0) if self.drops else True
        if success:
            self.cached = None
        return {"success": success}

    def _abort(self, _: dict[str, Any]) -> dict[str, Any]:
        self.aborts += 1
        return {}

    async def _sample(self, ticket: str | None) -> int | None:
        """The next token; None when the request is aborted."""
        aborts = self.aborts
        await asyncio.sleep(_TOKEN_EVERY_S)
        while self.paused and self.aborts == aborts:
            await asyncio.sleep(_TOKEN_EVERY_S)
        if self.aborts > aborts:
            return None
        if ticket is not None:
            self.sampled[ticket] = self.sampled.get(ticket, 0) + 1
        held = {worker.weights for worker in self.workers}
        if len(held) > 1:
            return MIXED
        weights = held.pop()
        if self.cached is None:
            self.cached = weights
        return weights if self.cached == weights else STALE

    async def _generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        ticket, count = ticket_in(body["request_id"]), body["sampling_params"]["max_tokens"]

        async def events() -> AsyncIterator[dict[str, Any]]:
            spans: list[dict[str, Any]] = []
            for place in range(count):
                token = await self._sample(ticket)
                if token is None:
                    yield {"token_ids": [], "finish_reason": "abort", "weight_versions": spans}
                    return
                if not spans or spans[-1]["version"] != self.label:
                    spans.append({"version": self.label, "start": place, "end": place})
                spans[-1]["end"] = place + 1
                content = [{"token_id": token, "logprob": -0.5, "rank": 1}]
                yield {"token_ids": [token], "logprobs": {"content": content}}
            yield {"token_ids": [], "finish_reason": "length", "weight_versions": spans}

        async def sent() -> AsyncIterator[bytes]:
            async for choice in events():
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(sent(), media_type="text/event-stream")
        choices = [choice async for choice in events()]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        content = [one for choice in choices[:-1] for one in choice["logprobs"]["content"]]
        return JSONResponse({"choices": [{**choices[-1], "token_ids": tokens, "logprobs": {"content": content}}]})

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())

        async def sent() -> AsyncIterator[bytes]:
            self.streams += 1
            try:
                for _ in range(body["max_tokens"]):
                    yield f"data: {await self._sample(None)}\n\n".encode()
                yield b"data: [DONE]\n\n"
            finally:
                self.streams -= 1

        return StreamingResponse(sent(), media_type="text/event-stream")


@dataclass
class Bench:
    """A scripted vLLM and the sidecar before it."""

    vllm: ScriptedVllm
    url: str
    control: ControlClient
    sidecar: Sidecar

    def client(self) -> EngineClient:
        return EngineClient(self.url, INFERENCE_TOKEN)

    def http(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {INFERENCE_TOKEN}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False)

    def target(self, step: int, **fields: Any) -> SlotStatus:
        """Target a version and wait until it is served or given up."""
        self.control.set_target(version=version(step), root=root(step), manifest="m/manifest.json", **fields)
        return self.control.wait_version(version(step), timeout_s=60)

    def status(self) -> SlotStatus:
        return self.control.status().slots["default"]

    def attached(self) -> bool:
        return self.control.metrics()["attached"] == 1


class _Listeners:
    """Applications, each on a port, in a thread with a loop of its own."""

    def __init__(self, *apps: ASGIApp) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in apps]
        self.urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in self._sockets]
        configs = [
            uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, timeout_graceful_shutdown=1)
            for app in apps
        ]
        self._servers = [uvicorn.Server(config) for config in configs]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        while not all(server.started for server in self._servers):
            time.sleep(0.001)

    def close(self) -> None:
        for server in self._servers:
            server.should_exit = True
        self._thread.join()
        for sock in self._sockets:
            sock.close()

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))


@contextlib.contextmanager
def serving(folder: Path, *, workers: int = 2) -> Iterator[Bench]:
    vocab = make.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    vllm = ScriptedVllm.of(workers)
    upstream = _Listeners(vllm.app())
    source = TransferSource(store=f"file://{folder}/store", folder=str(folder))
    sidecar = Sidecar(
        SidecarOptions(
            model=folder, name="tiny", url=upstream.urls[0], inference_token=INFERENCE_TOKEN,
            control_token=CONTROL_TOKEN, source=source, slot="default", twin=False, max_seqs=8, max_len=1 << 16,
            max_waiting=8, drain_s=0.0,
        )
    )  # fmt: skip
    listeners = _Listeners(sidecar.inference_app, sidecar.control_app)
    sidecar.replica.start()
    try:
        with ControlClient(listeners.urls[1], CONTROL_TOKEN) as control:
            yield Bench(vllm, listeners.urls[0], control, sidecar)
    finally:
        sidecar.close()
        listeners.close()
        upstream.close()
