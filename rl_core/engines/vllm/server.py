"""The sidecar's two listeners, and the vLLM behind them if it is the sidecar's own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp

from rl_core.chat import ChatTokenizer
from rl_core.engines.control_api import ControlApi
from rl_core.engines.listeners import application, control_routes, serve_both
from rl_core.engines.vllm.generate import VllmGenerateApi
from rl_core.engines.vllm.messages import TransferSource
from rl_core.engines.vllm.openai import VllmOpenAiApi
from rl_core.engines.vllm.replica import VllmReplica
from rl_core.engines.vllm.targets import VllmTargets
from rl_core.engines.vllm.upstream import VllmControl, VllmInference
from rl_core.errors import ModelError

log = logging.getLogger(__name__)

_STOP_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """How a sidecar is set up. `source` None: it takes no targets."""

    model: Path
    name: str
    url: str
    inference_token: str
    control_token: str
    source: TransferSource | None
    slot: str
    twin: bool
    max_seqs: int
    max_len: int
    max_waiting: int
    drain_s: float


class Sidecar:
    """One vLLM with our protocols before it. Raises: ModelError."""

    def __init__(self, options: SidecarOptions) -> None:
        tokenizer = ChatTokenizer.load(options.model)
        self.replica = VllmReplica(
            VllmControl(options.url), slot=options.slot, source=options.source, twin=options.twin,
            max_seqs=options.max_seqs, max_waiting=options.max_waiting, drain_s=options.drain_s,
        )  # fmt: skip
        self._targets = {options.slot: VllmTargets(self.replica)} if options.source else {}
        inference = VllmInference(options.url, max_connections=options.max_seqs + options.max_waiting + 8)
        generate = VllmGenerateApi(
            self.replica, inference, tokenizer, slot=options.slot, max_len=options.max_len,
            vocab=_vocab(options.model),
        )  # fmt: skip
        openai = VllmOpenAiApi(self.replica, inference, name=options.name, born=int(time.time()))
        control = ControlApi(self.replica, self._targets, name=options.name)
        self.inference_app: ASGIApp = application(
            [
                Route("/v1/models", openai.models, methods=["GET"]),
                Route("/v1/chat/completions", openai.chat, methods=["POST"]),
                Route("/v1/completions", openai.completions, methods=["POST"]),
                Route("/v1/generate", generate.generate, methods=["POST"]),
            ],
            options.inference_token,
        )
        self.control_app: ASGIApp = application(control_routes(control), options.control_token)

    def close(self) -> None:
        """Fail what is in flight and end every thread."""
        for targets in self._targets.values():
            targets.close()
        self.replica.close()


async def serve(
    sidecar: Sidecar, inference: socket.socket, control: socket.socket, *, vllm: subprocess.Popen[bytes] | None
) -> int | None:
    """Serve until SIGTERM or SIGINT, or until `vllm` ends; its exit code in that case, else None.

    A vLLM of ours ends with us. One that is not ours may come and go.
    """
    sidecar.replica.start()
    ended = asyncio.Event()
    if vllm is not None:
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=lambda: (vllm.wait(), loop.call_soon_threadsafe(ended.set)), name="wait-vllm", daemon=True
        ).start()
    try:
        await serve_both(
            (sidecar.inference_app, inference), (sidecar.control_app, control), close=sidecar.close, ended=ended
        )
    finally:
        died = vllm.poll() if vllm is not None else None
        if vllm is not None and died is None:
            stop(vllm)
    return died


def stop(vllm: subprocess.Popen[bytes]) -> None:
    """End a vLLM of ours."""
    vllm.terminate()
    try:
        vllm.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        vllm.kill()
        vllm.wait()


def _vocab(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}/config.json does not read: {error}") from error
