"""From a trainer process to two engine processes: a delta beside a full checkpoint, and what users feel of a swap.

SmolLM2-135M, a real pair of versions (AdamW at lr 3e-6: 0.9 % of the weights change). The clock runs from the order to
publish until both engines serve the version and have verified its root. Both arms read through the same HTTP server
over loopback, in the same parts; they hash, stage and swap alike. `_200mbit`: each engine's reads have the transfer's
own limit of 200 Mbit/s.

Then requests run without a break through swaps. Each version samples a token of its own (`sync_trainer`), so that every
token's version span can be checked by the token itself. `pause_steps_embedded` is the longest time between the ends of
two decode steps from the target's arrival until after the flip, in median steps: the median of all swaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Progress, rounds
from benchmarks.sync_store import serving
from benchmarks.sync_trainer import mark_of
from benchmarks.web import free_ports
from rl_core.engines.client import EngineClient
from rl_core.engines.control_client import ControlClient
from rl_core.errors import EngineUnreachable, RlCoreError
from rl_core.types import Generated, SamplingParams

_LINKS: Final = {"200mbit": 200e6 / 8, "loopback": None}
_ENGINES: Final = 2
_SEQUENCES: Final = 4  # running in each engine during swaps
_TOKENS: Final = 96
_TOKEN: Final = secrets.token_hex(16)


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Both arms over both links, then swaps under load."""
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder, _Rig.started(Path(folder), progress) as rig:
        progress("warming up: one of each arm")  # a delta first: the copy that deltas apply to is of what serves then
        for arm in ("delta", "full"):
            rig.sync(arm, limit_bytes_s=None)
        result: dict[str, object] = {"mib": rig.full_bytes / 2**20}
        for link, limit in _LINKS.items():
            result |= _speedup(rig, link, limit, repeats=rounds(quick=quick), progress=progress)
        result |= asyncio.run(_swaps_under_load(rig, count=8 if quick else 20, progress=progress))
    return result | _vllm_pause(quick=quick, progress=progress)


def _vllm_pause(*, quick: bool, progress: Progress) -> dict[str, object]:
    """What `benchmarks.vllm_pause` measures in vLLM's environment, where `make test-vllm` has made that."""
    root = Path(__file__).resolve().parents[1]
    python = root / ".venv-vllm/bin/python"
    if not python.exists():
        return {"missing": ["pause_vllm_vs_reload"]}
    progress("vLLM: a delta's pause beside its own reload")
    command = [str(python), "-m", "benchmarks.vllm_pause", "--versions", "2" if quick else "6"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    numbers: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    progress(f"vLLM: pause {numbers['pause_vllm_s']:.3f} s, reload {numbers['reload_vllm_s']:.3f} s")
    return numbers


def _speedup(rig: _Rig, link: str, limit: float | None, *, repeats: int, progress: Progress) -> dict[str, object]:
    """Full and delta in turn; their medians and ratio."""
    seconds: dict[str, list[float]] = {"full": [], "delta": []}
    for _ in range(repeats):
        for arm, taken in seconds.items():
            taken.append(rig.sync(arm, limit_bytes_s=limit))
            progress(f"{link} {arm}: {taken[-1]:.2f} s, {rig.last}")
    full, delta = (statistics.median(taken) for taken in seconds.values())
    return {f"speedup_{link}": full / delta, f"full_s_{link}": full, f"delta_s_{link}": delta}


@dataclass
class _Load:
    """What came of the requests. `bad_spans` counts tokens that are not of the version their span names."""

    requests: int = 0
    tokens: int = 0
    mixed: int = 0
    lost: int = 0
    bad_spans: int = 0
    running: bool = True

    def take(self, generated: Generated) -> None:
        self.requests += 1
        self.tokens += len(generated.token_ids)
        self.mixed += len(generated.spans) > 1
        whole = len(generated.token_ids) == _TOKENS
        self.lost += not whole
        named = [0] * len(generated.token_ids)
        for span in generated.spans:
            named[span.start : span.end] = [mark_of(_number(span.version))] * (span.end - span.start)
        self.bad_spans += sum(name != token for name, token in zip(named, generated.token_ids, strict=True))


async def _swaps_under_load(rig: _Rig, *, count: int, progress: Progress) -> dict[str, object]:
    load = _Load()
    gaps: list[float] = []
    callers = [asyncio.create_task(_keep_asking(engine, load)) for engine in rig.engines for _ in range(_SEQUENCES)]
    await asyncio.sleep(2)
    for swap in range(count):
        await asyncio.to_thread(rig.sync, "delta", limit_bytes_s=None)
        await asyncio.sleep(0.5)
        metrics = [await asyncio.to_thread(engine.metrics) for engine in rig.engines]
        gaps += [one["update_gap_s"] / one["decode_step_median_s"] for one in metrics]
        progress(f"swap {swap + 1} of {count} under load: longest gaps {', '.join(f'{gap:.2f}' for gap in gaps[-2:])}")
    load.running = False
    await asyncio.gather(*callers)
    return {
        "pause_steps_embedded": statistics.median(gaps),
        "pause_steps_embedded_max": max(gaps),
        "flip_ms": 1e3 * max(one["last_pause_s"] for one in metrics),
        "decode_step_ms": 1e3 * statistics.median(one["decode_step_median_s"] for one in metrics),
        "lost_requests": load.lost,
        "bad_spans": load.bad_spans,
        "swaps": count,
        "requests": load.requests,
        "requests_over_swaps": load.mixed,
        "tokens": load.tokens,
    }


async def _keep_asking(engine: _Engine, load: _Load) -> None:
    prompt = list(range(500, 540))
    async with EngineClient(engine.url, _TOKEN) as client:
        while load.running:
            try:
                load.take(await client.generate(prompt, SamplingParams(max_tokens=_TOKENS)))
            except RlCoreError:
                load.lost += 1


@dataclass
class _Engine:
    """One engine process."""

    process: subprocess.Popen[bytes]
    url: str
    control_url: str

    def control(self) -> ControlClient:
        return ControlClient(self.control_url, _TOKEN)

    def metrics(self) -> dict[str, Any]:
        with self.control() as control:
            return control.metrics()


@dataclass
class _Rig:
    """The processes. `last` describes the last version's transfer."""

    trainer: subprocess.Popen[str]
    engines: list[_Engine]
    full_bytes: int = 0
    number: int = 0
    last: str = ""
    controls: list[ControlClient] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, progress: Progress) -> Iterator[_Rig]:
        """Start everything, and end it."""
        with contextlib.ExitStack() as stack:
            progress("starting the trainer")
            command = _module("sync_trainer", str(folder))
            trainer = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            _ended_with(stack, trainer)
            rig = cls(trainer, [])
            rig.full_bytes = int(rig.tell(do="start")["bytes"])
            store = stack.enter_context(serving(folder / "store"))
            progress("starting two engines")
            for name in range(_ENGINES):
                port, control = free_ports(2)
                command = _module("sync_engine", "--model", str(folder / "model"), "--store", store, "--token", _TOKEN)
                command += ["--name", str(name), "--port", str(port), "--control-port", str(control)]
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                _ended_with(stack, process)
                rig.engines.append(_Engine(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control}"))
            for engine in rig.engines:
                rig.controls.append(stack.enter_context(contextlib.closing(_once_healthy(engine))))
            yield rig

    def tell(self, **command: object) -> dict[str, Any]:
        """Have the trainer do something."""
        assert self.trainer.stdin is not None
        assert self.trainer.stdout is not None
        self.trainer.stdin.write(json.dumps(command) + "\n")
        self.trainer.stdin.flush()
        line = self.trainer.stdout.readline()
        if not line:
            raise EngineUnreachable("the benchmark's trainer ended; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sync(self, arm: str, *, limit_bytes_s: float | None) -> float:
        """Publish a next version and wait until both engines serve it; seconds."""
        self.number += 1
        self.tell(do="prepare", number=self.number)
        version = f"bench:0-{self.number}"
        started = time.perf_counter()
        published = self.tell(do=arm, number=self.number)
        for control in self.controls:
            control.set_target(
                version=version, root=published["root"], manifest=published["key"], limit_bytes_s=limit_bytes_s
            )
        statuses = [control.wait_version(version, timeout_s=300) for control in self.controls]
        seconds = time.perf_counter() - started
        for status in statuses:
            if (status.version, status.root) != (version, published["root"]):
                raise EngineUnreachable(f"an engine did not come to {version}: {status.error}")
        update = statuses[0].update
        assert update is not None
        self.last = (
            f"{published['bytes']} bytes: publish {published['seconds']:.2f}, fetch {update.fetch_s:.2f}, decode "
            f"{update.decode_s:.2f}, verify {update.verify_s:.2f}, stage {update.stage_s:.2f}"
        )
        return seconds


def _ended_with(stack: contextlib.ExitStack, process: subprocess.Popen[Any]) -> None:
    stack.enter_context(process)
    stack.callback(process.kill)


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *arguments]


def _once_healthy(engine: _Engine) -> ControlClient:
    control = engine.control()
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(EngineUnreachable):
            control.health()
            return control
        if engine.process.poll() is not None or time.monotonic() > deadline:
            raise EngineUnreachable("an engine of the benchmark does not start; its errors are above")
        time.sleep(0.1)


def _number(version: str) -> int:
    return int(version.rpartition("-")[2])
