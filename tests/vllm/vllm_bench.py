"""One vLLM, started by hand, which serves most of these tests; sidecars attach to it and come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import vllm_rig as rig
from engine_process import free_ports

from rl_core.engines.protocol import SlotState
from rl_core.types import Generated, SamplingParams

FAULTY = "faulty_worker.FaultyWorkerExtension"


class Bench:
    """A vLLM, its sidecar, and versions whose tokens tell which of them sampled.

    It begins on the checkpoint of `trained` after its ten deltas; `fresh` is what it answered before anybody swapped.
    `flags` are vLLM's.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.trained = rig.Line(rig.model_folder(folder / "base", routed=False), folder / "trained")
        self.trained.ten_deltas()
        self.model = self.trained.export(folder / "exported")
        self.line = rig.Line(self.model, folder / "store")
        self.base = self.line.tensors
        self.state = folder
        self.flags = ("--worker-extension-cls", FAULTY, *flags)
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.vllm: rig.Process | None = None
        self.sidecar: rig.Sidecar | None = None

    def start(self) -> None:
        self.start_vllm()
        self.attach()
        self.fresh = asyncio.run(rig.batch(self.sidecar))

    def end(self) -> None:
        with rig.ending(*(process for process in (self.sidecar, self.vllm) if process is not None)):
            pass

    def start_vllm(self) -> None:
        self.vllm = rig.vllm(self.model, self.state, *self.flags, port=self.port)

    def attach(self) -> None:
        self.start_sidecar()
        self.sidecar.wait_attached()

    def start_sidecar(self, *flags: str) -> None:
        # Without a twin, so that updates go into the model that generates, and can break off there.
        self.sidecar = rig.sidecar(self.model, self.state, self.line, "--no-twin", *flags, vllm_url=self.url)

    def kill_vllm(self) -> None:
        """All of its processes, at once."""
        os.killpg(self.vllm.process.pid, signal.SIGKILL)
        self.vllm.process.wait()

    def sign(self, token: int) -> rig.Version:
        """Publish a version that samples `token` alone."""
        return self.line.publish(rig.signature(self.line.tensors, token))

    def hold_load(self, version: rig.Version, *, then: str = "go on", rank: int = 0) -> Path:
        """Target a version and return in the middle of its swap; it goes on when the file that is returned is gone."""
        gate = self.state / "gate"
        self.ask_worker("slipway_hold_load", str(gate), then, rank=rank)
        with self.sidecar.control() as control:
            control.set_target(version=version.name, root=version.root, manifest=version.manifest)
        rig.wait_until(gate.exists)
        return gate

    def ask_worker(self, method: str, *arguments: str, rank: int = 0) -> None:
        """Have one rank do what its extension has a method for."""
        body = {"method": "slipway_of_rank", "args": [str(rank), method, *arguments]}
        httpx.post(f"{self.url}/collective_rpc", json=body, timeout=60).raise_for_status()

    async def tokens(self, count: int = 4, **bounds: object) -> Generated:
        async with self.sidecar.client() as client:
            return await client.generate([1, 2, 3], SamplingParams(max_tokens=count), **bounds)

    def serves(self, version: rig.Version, token: int) -> None:
        """The version answers, by its own weights and under its own name."""
        result = asyncio.run(self.tokens())
        assert result.token_ids == [token] * 4
        assert [span.version for span in result.spans] == [version.name]
        status = self.sidecar.status()
        assert (status.version, status.root, status.state) == (version.name, version.root, SlotState.READY)
