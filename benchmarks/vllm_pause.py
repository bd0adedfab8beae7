"""How long vLLM stands still for a new version: a delta through the sidecar against its own reload of a checkpoint.

For vLLM's environment: `.venv-vllm/bin/python -m benchmarks.vllm_pause`, after `make test-vllm`; `benchmarks sync`
calls it where that exists. One vLLM serves SmolLM2-135M while callers generate without a break. Each version comes
both ways, one after the other: as a delta (0.28 % of elements moved by one ULP, as a step at lr 1e-6 moves them; fetch,
decode and verify before the pause), and as a safetensors folder by `reload_weights`. Both pause with `keep`, both drop
caches, both are timed from the pause to the resume. The last line is a JSON object; times are medians, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from rl_core.delta import Base, publish_delta, publish_snapshot
from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import ControlClient
from rl_core.engines.sockets import bind
from rl_core.engines.vllm.launch import VllmOptions, vllm_arguments, vllm_command, vllm_environment
from rl_core.errors import RlCoreError
from rl_core.models.checkpoint import read_checkpoint, write_checkpoint
from rl_core.store import open_store
from rl_core.types import PauseMode, SamplingParams, VersionRef

MODEL = Path("var/models/smollm2-135m-instruct")
DENSITY = 0.0028
CALLERS = 4
START_S = 300.0


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_pause")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--versions", type=int, default=6)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # vLLM and the sidecar end with this process
    with tempfile.TemporaryDirectory(prefix="vllm-pause-") as scratch, started(arguments.model, Path(scratch)) as pair:
        numbers = asyncio.run(measure(pair, arguments.model, Path(scratch), versions=arguments.versions))
    print(json.dumps(numbers))
    return 0


class Pair:
    """A vLLM and the sidecar before it."""

    def __init__(self, vllm_url: str, url: str, control_url: str) -> None:
        self.vllm = httpx.Client(base_url=vllm_url, timeout=300, trust_env=False)
        self.control = ControlClient(control_url, "control")
        self.url = url

    def reload(self, folder: Path) -> float:
        """The way that vLLM has itself: pause, read the whole checkpoint, drop caches, resume; seconds."""
        started = time.perf_counter()
        self._post("/pause", params={"mode": PauseMode.KEEP.value})
        self._post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        self._post("/resume")
        return time.perf_counter() - started

    def _post(self, path: str, **options: Any) -> None:
        self.vllm.post(path, **options).raise_for_status()


async def measure(pair: Pair, model: Path, scratch: Path, *, versions: int) -> dict[str, float]:
    """Both arms over the same versions."""
    store = open_store((scratch / "store").as_uri())
    tensors = read_checkpoint(model)
    generator = torch.Generator().manual_seed(0)
    ref = VersionRef("pause", 0, 0)
    made = publish_snapshot(store, tensors, key_prefix="snapshots/base", version=ref)
    base = Base(str(ref), made.root, made.manifest_key)
    pauses: list[float] = []
    loads: list[float] = []
    reloads: list[float] = []
    over = asyncio.Event()
    async with EngineClient(pair.url, "inference") as client:
        callers = [asyncio.ensure_future(_generate_on(client, over, place)) for place in range(CALLERS)]
        for number in range(1, versions + 1):
            new = {name: _moved(tensor, generator) for name, tensor in tensors.items()}
            ref = VersionRef("pause", 0, number)
            made = publish_delta(store, old=tensors, new=new, version=ref, base=base, fence=0)
            write_checkpoint(folder := scratch / f"version-{number}", new, like=model)
            pair.control.set_target(version=str(ref), root=made.root, manifest=made.manifest_key)
            status = await asyncio.to_thread(pair.control.wait_version, str(ref), timeout_s=120)
            if status.version != str(ref) or status.update is None:
                raise SystemExit(f"the delta was not served: {status.error}")
            pauses.append(status.update.pause_s)
            loads.append(status.update.stage_s)
            reloads.append(await asyncio.to_thread(pair.reload, folder))
            tensors, base = new, Base(str(ref), made.root, made.manifest_key)
        over.set()
        await asyncio.gather(*callers)
    shadow_bytes = pair.control.metrics()["shadow_bytes"]
    return {
        "pause_vllm_s": statistics.median(pauses),
        "load_vllm_s": statistics.median(loads),
        "reload_vllm_s": statistics.median(reloads),
        "pause_vllm_vs_reload": statistics.median(pauses) / statistics.median(reloads),
        "shadow_vllm_bytes": shadow_bytes,
        "versions_vllm": versions,
    }


async def _generate_on(client: EngineClient, over: asyncio.Event, place: int) -> None:
    while not over.is_set():
        await client.generate([place + 1] * 16, SamplingParams(max_tokens=32, seed=place))


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    words = tensor.clone().view(torch.int16)
    words += (torch.rand(words.shape, generator=generator) < DENSITY).to(torch.int16)
    return words.view(tensor.dtype)


@contextlib.contextmanager
def started(model: Path, scratch: Path) -> Iterator[Pair]:
    """A vLLM and its sidecar, both ended afterwards."""
    ports = [_free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    options = VllmOptions(model=model, name="pause", port=ports[0], max_seqs=8, max_len=512)
    environment = vllm_environment(os.environ, cpu=True, shim=scratch / "shim")  # noqa: TID251 - what it inherits
    for name in ("inference", "control"):
        (scratch / name).write_text(name)
    sidecar = [
        sys.executable, "-m", "rl_core.engines.vllm", "--model", str(model), "--name", "pause",
        "--store", (scratch / "store").as_uri(), "--port", str(ports[1]), "--control-port", str(ports[2]),
        "--inference-token-file", str(scratch / "inference"), "--control-token-file", str(scratch / "control"),
        "--max-seqs", "8", "--max-len", "512", "--vllm-url", urls[0],
    ]  # fmt: skip
    (scratch / "store").mkdir()
    with (scratch / "log").open("wb") as log:
        processes = [
            subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            for command, env in ((vllm_command(vllm_arguments(options, cpu=True)), environment), (sidecar, None))
        ]
    try:
        pair = Pair(*urls)
        _wait(pair, processes, scratch / "log")
        yield pair
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(60)


def _wait(pair: Pair, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break
        with contextlib.suppress(RlCoreError):
            if pair.control.metrics()["attached"]:
                return
        time.sleep(0.2)
    raise SystemExit(f"vLLM or its sidecar did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with bind("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
