"""Rotary position embeddings: the tables, and their application to queries and keys."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rl_core.engines.config import Architecture, ModelConfig
from rl_core.errors import ModelError

# Kinds whose frequencies do not depend on the length of the sequence at hand.
_STATIC: Final = frozenset({"default", "linear", "llama3", "yarn"})


class RotaryTables:
    """Cosines and sines of every position. Shapes: `[positions, head_dim]` each, in the compute dtype."""

    def __init__(self, config: ModelConfig, *, positions: int, dtype: torch.dtype) -> None:
        frequencies, scale = _frequencies(config)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = torch.cat((cos, cos), dim=-1).to(dtype)
        # The first half is subtracted: the sign lives in the table, so that applying it is one multiply-add.
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of the tokens' positions. Shapes: `[M]` → two `[M, 1, head_dim]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys by their positions. Shapes: x `[M, heads, head_dim]`.

    Source: RoFormer, arXiv 2104.09864, in the half-split form of Llama.
    """
    half = x.shape[-1] // 2
    turned = torch.roll(x, half, dims=-1)
    return torch.addcmul(x * cos, turned, sin)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    kind = str(config.rope.get("rope_type"))
    if kind not in _STATIC:
        raise ModelError(f"rope_type {kind!r} is not supported by the embedded engine; supported: {sorted(_STATIC)}")
    if kind == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(config.rope["rope_theta"]) ** steps), 1.0
    # Imported here: transformers takes a second to import, and plain models do not need it.
    from transformers import LlamaConfig, MixtralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    form = MixtralConfig if config.architecture is Architecture.MIXTRAL else LlamaConfig
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](form(**config.raw), device=torch.device("cpu"))
    return frequencies.float(), float(scale)
