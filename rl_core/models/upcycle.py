"""Sparse upcycling: a dense Llama checkpoint becomes a mixture of experts in Mixtral's form.

Every feed-forward block is copied into E experts behind a new router. With identical experts and normalised top-k
gates the logits are those of the dense model; training then makes the experts differ.
Source: Komatsuzaki et al. 2022, "Sparse Upcycling" (arXiv:2212.05055); ours normalises the gates after top-k.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import ModelError
from rl_core.models.checkpoint import read_checkpoint, read_config, write_checkpoint

ROUTER_STD = 0.02
EXPERT_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

log = logging.getLogger(__name__)


def upcycle(src: Path, dst: Path, *, experts: int = 4, top_k: int = 2, noise: float = 0.0, seed: int = 0) -> Path:
    """Write the upcycled form of the dense folder `src` to the new folder `dst`, atomically; return `dst`.

    `noise` is the standard deviation of what is added to each expert's weights, relative to the weights' own
    (0: identical experts). Equal arguments give equal bytes.
    Raises: ModelError when `src` is not a dense Llama folder, `dst` exists, or the sizes make no mixture.
    """
    src, dst = Path(src), Path(dst)
    if not 1 <= top_k <= experts:
        raise ModelError(f"top_k must be between 1 and experts ({experts}), not {top_k}")
    if noise < 0:
        raise ModelError(f"noise must not be negative, not {noise}")
    config = read_config(src)
    if config.get("model_type") != "llama":
        raise ModelError(f"{src} holds a {config.get('model_type')!r} model; only a dense llama can be upcycled")
    if dst.exists():
        raise ModelError(f"{dst} exists; model folders are written once")
    generator = torch.Generator().manual_seed(seed)
    tensors = _mixture(read_checkpoint(src), experts=experts, noise=noise, generator=generator)
    dst.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    try:
        write_checkpoint(scratch / "model", tensors, like=src, config=_mixtral_config(config, experts, top_k))
        os.rename(scratch / "model", dst)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("event=model_upcycled folder=%s experts=%s top_k=%s noise=%s", dst, experts, top_k, noise)
    return dst


def _mixture(dense: dict[str, Tensor], *, experts: int, noise: float, generator: torch.Generator) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        prefix, found, rest = name.partition(".mlp.")
        if not found:
            tensors[name] = tensor
            continue
        part = EXPERT_PARTS[rest.removesuffix(".weight")]
        block = f"{prefix}.block_sparse_moe"
        gate = f"{block}.gate.weight"
        if gate not in tensors:
            hidden = dense[f"{prefix}.mlp.gate_proj.weight"].shape[1]
            router = torch.empty(experts, hidden).normal_(0.0, ROUTER_STD, generator=generator)
            tensors[gate] = router.to(tensor.dtype)
        for expert in range(experts):
            tensors[f"{block}.experts.{expert}.{part}.weight"] = _perturbed(tensor, noise, generator)
    return tensors


def _perturbed(tensor: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    if noise == 0.0:
        return tensor.clone()
    exact = tensor.float()
    drawn = torch.empty_like(exact).normal_(0.0, 1.0, generator=generator)
    return (exact + noise * exact.std() * drawn).to(tensor.dtype)


def _mixtral_config(config: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    dropped = {"attention_bias", "mlp_bias", "pretraining_tp"}
    if any(config.get(key) for key in ("attention_bias", "mlp_bias")):
        raise ModelError("the dense model has biases; the Mixtral form has none")
    kept = {key: value for key, value in config.items() if key not in dropped}
    return kept | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }
