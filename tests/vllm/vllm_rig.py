"""vLLM and its sidecar as processes, versions to target them with, and batches whose shape is the same each time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import engine_factories as make
import torch
from engine_process import CONTROL_TOKEN, INFERENCE_TOKEN, free_ports
from safetensors.torch import save_file

from rl_core.delta import Base, publish_delta, publish_snapshot
from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import SlotStatus
from rl_core.engines.vllm.launch import VllmOptions, vllm_arguments, vllm_command, vllm_environment
from rl_core.errors import RlCoreError
from rl_core.models.checkpoint import read_checkpoint, write_checkpoint
from rl_core.store import open_store
from rl_core.types import Generated, PauseMode, SamplingParams, VersionRef

ROOT = Path(__file__).resolve().parents[2]
LINEAGE = "0192f0c4-0000-7000-8000-000000000001"
START_S = 600.0
# Sizes that vLLM's CPU kernels take.
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
MAX_SEQS, MAX_LEN = 8, 512

Tensors = dict[str, torch.Tensor]


def model_folder(folder: Path, *, routed: bool) -> Path:
    """A tiny random model that ends a sequence only by its limit.

    The dense one's head is its embedding. The mixture's is a tensor of its own, which is equal to it at first.
    """
    made = make.endless_model_folder(folder, routed=routed, dtype=torch.bfloat16, **SIZES)
    if routed:
        tensors = read_checkpoint(made)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@dataclass
class Version:
    ref: VersionRef
    root: str
    manifest: str

    @property
    def name(self) -> str:
        return str(self.ref)


class Line:
    """A lineage in a store: a snapshot of a folder, then deltas."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder, self.url = folder, store.as_uri()
        store.mkdir(parents=True, exist_ok=True)
        self.store = open_store(self.url)
        self.tensors = read_checkpoint(folder)
        first = VersionRef(LINEAGE, 0, 0)
        made = publish_snapshot(self.store, self.tensors, key_prefix="snapshots/base", version=first)
        self.versions = [Version(first, made.root, made.manifest_key)]

    def publish(self, changed: Mapping[str, torch.Tensor]) -> Version:
        last, new = self.versions[-1], {**self.tensors, **changed}
        ref = VersionRef(LINEAGE, 0, last.ref.number + 1)
        base = Base(last.name, last.root, last.manifest)
        made = publish_delta(self.store, old=self.tensors, new=new, version=ref, base=base, fence=0)
        self.tensors = new
        self.versions.append(Version(ref, made.root, made.manifest_key))
        return self.versions[-1]

    def ten_deltas(self) -> None:
        """Ten steps. Some touch one tensor of a fused group alone: q without k and v, one expert of four."""
        alone = {
            3: ["model.layers.0.self_attn.q_proj.weight"],
            5: [name for name in self.tensors if name.endswith(("layers.1.mlp.up_proj.weight", "experts.2.w1.weight"))],
            8: ["model.norm.weight"],
        }
        for step in range(1, 11):
            self.publish(stepped(self.tensors, seed=step, names=alone.get(step)))

    def steps(self) -> int:
        """How many versions the shortest way from the first to the last has: where weights came back, it is shorter."""
        roots: list[str] = []
        for version in self.versions:
            if version.root in roots:
                del roots[roots.index(version.root) :]
            roots.append(version.root)
        return len(roots)

    def export(self, folder: Path) -> Path:
        write_checkpoint(folder, self.tensors, like=self.folder)
        return folder


def stepped(tensors: Tensors, *, seed: int, names: list[str] | None = None, share: float = 0.02) -> Tensors:
    """Tensors with a share of their elements moved by a few ULPs, as a training step does, one far enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name in names or sorted(tensors):
        words = tensors[name].clone().view(torch.int16)
        chosen = torch.rand(words.shape, generator=generator) < share
        words[chosen] += torch.randint(1, 24, (int(chosen.sum()),), generator=generator, dtype=torch.int16)
        changed[name] = words.view(torch.bfloat16)
    return changed


def signature(tensors: Tensors, token: int) -> Tensors:
    """Weights that sample `token` and nothing else, so that each token tells which weights sampled it."""
    changed = {}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            changed[name] = torch.zeros_like(tensor)
        elif name.endswith("norm.weight"):
            changed[name] = torch.ones_like(tensor)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = torch.ones_like(tensor)
            rows[token] = 2.0
            changed[name] = rows
    return changed


@dataclass
class Process:
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def alive(self) -> bool:
        return self.process.poll() is None

    def told(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Sidecar(Process):
    url: str
    control_url: str

    def control(self) -> ControlClient:
        return ControlClient(self.control_url, CONTROL_TOKEN)

    def client(self) -> EngineClient:
        return EngineClient(self.url, INFERENCE_TOKEN)

    def target(self, version: Version, **fields: object) -> SlotStatus:
        """Target a version and wait until it is served or given up."""
        with self.control() as control:
            control.set_target(version=version.name, root=version.root, manifest=version.manifest, **fields)
            return control.wait_version(version.name, timeout_s=60)

    def serve(self, version: Version, **fields: object) -> SlotStatus:
        status = self.target(version, **fields)
        assert (status.version, status.root, status.error) == (version.name, version.root, None), self.told()[-3000:]
        return status

    def status(self) -> SlotStatus:
        with self.control() as control:
            return control.status().slots["default"]

    def metrics(self) -> dict[str, float]:
        with self.control() as control:
            return control.metrics()

    def wait_attached(self) -> None:
        def attached() -> bool:
            assert self.alive(), self.told()[-5000:]
            with contextlib.suppress(RlCoreError):
                return self.metrics()["attached"] == 1
            return False

        wait_until(attached, timeout_s=START_S)


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every_s)


def sidecar(folder: Path, state: Path, line: Line, *flags: str, vllm_url: str | None = None) -> Sidecar:
    """A sidecar process; without `vllm_url` it brings its vLLM."""
    state.mkdir(parents=True, exist_ok=True)
    for name, token in (("inference", INFERENCE_TOKEN), ("control", CONTROL_TOKEN)):
        (state / f"{name}.token").write_text(token + "\n")
    port, control_port = free_ports(2)
    command = [
        sys.executable, "-m", "rl_core.engines.vllm", "--model", str(folder), "--name", "tiny", "--store", line.url,
        "--port", str(port), "--control-port", str(control_port), "--max-seqs", str(MAX_SEQS),
        "--max-len", str(MAX_LEN), "--inference-token-file", str(state / "inference.token"),
        "--control-token-file", str(state / "control.token"), "--drain-s", "2", *flags,
    ]  # fmt: skip
    if vllm_url is not None:
        command += ["--vllm-url", vllm_url]
    process, log = start(command, state / "sidecar.log", {**os.environ, "PYTHONPATH": str(ROOT)})
    return Sidecar(process, log, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control_port}")


def vllm(folder: Path, state: Path, *extra: str, port: int, routes: bool = False) -> Process:
    """An unmodified `vllm serve`, with the flags that the sidecar would start it with."""
    options = VllmOptions(
        model=folder, name="tiny", port=port, max_seqs=MAX_SEQS, max_len=MAX_LEN, routes=routes, extra=extra
    )
    paths = f"{ROOT}:{Path(__file__).parent}"
    environment = vllm_environment({**os.environ, "PYTHONPATH": paths}, cpu=True, shim=state / "shim")
    process, log = start(vllm_command(vllm_arguments(options, cpu=True)), state / "vllm.log", environment)
    return Process(process, log)


def start(command: list[str], log: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        # A session of its own, so that what vLLM starts ends with it.
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True), log


@contextlib.contextmanager
def ending(*processes: Process) -> Iterator[None]:
    """End the processes, and all that they started, whatever happens."""
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if one.alive():
                    one.stop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, 9)
            one.process.wait()


PROMPTS = [make.random_prompt(length, seed=length) for length in (5, 17, 40, 64, 3, 140, 150, 90)]


async def batch(sidecar: Sidecar, *, routes: bool = False, max_tokens: int = 24) -> list[Generated]:
    """The prompts in one batch that has the same shape each time: all are there before the first step is made.

    Half of them greedily, half with seeds.
    """
    async with sidecar.client() as client:
        with sidecar.control() as control:
            await asyncio.to_thread(control.pause, PauseMode.KEEP)
            tasks = []
            for place, prompt in enumerate(PROMPTS):
                sampling = SamplingParams(temperature=float(place % 2), seed=place, max_tokens=max_tokens)
                tasks.append(asyncio.ensure_future(client.generate(prompt, sampling, return_routes=routes)))
                # They arrive in this order; what is counted has been asked of vLLM, behind them.
                await asyncio.to_thread(wait_until, lambda count=place + 1: sidecar.metrics()["running"] == count)
                await asyncio.to_thread(sidecar.metrics)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(control.resume)
        return await asyncio.gather(*tasks)


def same(one: list[Generated], other: list[Generated]) -> None:
    """Tokens, logprobs and routes are equal, bit for bit."""
    assert [result.token_ids for result in one] == [result.token_ids for result in other]
    assert [result.logprobs for result in one] == [result.logprobs for result in other]
    assert [result.routes for result in one] == [result.routes for result in other]
