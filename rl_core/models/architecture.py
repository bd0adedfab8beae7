"""What a model folder's config says, as far as the trainer needs it, and the table of its tensors.

The table's order is storage order: tensors that one matrix product reads together (q, k, v; gate, up) are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_core.errors import ModelError
from rl_core.models.checkpoint import read_config

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a Llama (`experts` 0) or Mixtral model. Letters as in `rl_core.types`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    experts: int = 0
    top_k: int = 0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def head_name(self) -> str:
        """The tensor that makes logits: the embedding when tied."""
        return EMBEDDING if self.tied else LM_HEAD

    def tensor_table(self) -> dict[str, torch.Size]:
        """Every tensor's checkpoint name and shape, in storage order."""
        table = {EMBEDDING: torch.Size((self.vocab, self.hidden))}
        for layer in range(self.layers):
            table.update(self._layer_table(layer))
        table[FINAL_NORM] = torch.Size((self.hidden,))
        if not self.tied:
            table[LM_HEAD] = torch.Size((self.vocab, self.hidden))
        return table

    def _layer_table(self, layer: int) -> dict[str, torch.Size]:
        prefix = f"model.layers.{layer}"
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        table = {
            f"{prefix}.input_layernorm.weight": (self.hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q_rows, self.hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_rows, self.hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_rows, self.hidden),
            f"{prefix}.self_attn.o_proj.weight": (self.hidden, q_rows),
            f"{prefix}.post_attention_layernorm.weight": (self.hidden,),
        }
        wide, narrow = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        if not self.experts:
            table |= {
                f"{prefix}.mlp.gate_proj.weight": wide,
                f"{prefix}.mlp.up_proj.weight": wide,
                f"{prefix}.mlp.down_proj.weight": narrow,
            }
        else:
            block = f"{prefix}.block_sparse_moe"
            table[f"{block}.gate.weight"] = (self.experts, self.hidden)
            for expert in range(self.experts):
                table[f"{block}.experts.{expert}.w1.weight"] = wide
                table[f"{block}.experts.{expert}.w3.weight"] = wide
            for expert in range(self.experts):
                table[f"{block}.experts.{expert}.w2.weight"] = narrow
        return {name: torch.Size(shape) for name, shape in table.items()}


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a model folder. Raises: ModelError for what this trainer cannot run exactly."""
    config = read_config(folder)
    kind = config.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise ModelError(f"{folder} holds a {kind!r} model; the trainer runs llama and mixtral")
    _refuse_unknown_variants(folder, config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Architecture(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=_rope_theta(config),
            tied=bool(config.get("tie_word_embeddings")),
            experts=int(config["num_local_experts"]) if kind == "mixtral" else 0,
            top_k=int(config["num_experts_per_tok"]) if kind == "mixtral" else 0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}/config.json lacks or misstates {error}") from error


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse_unknown_variants(folder: Path, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    odd = {
        "rope type": scaling.get("rope_type", scaling.get("type", "default")) not in ("default", None),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": config.get("sliding_window") is not None,
    }
    found = [name for name, present in odd.items() if present]
    if found:
        raise ModelError(f"{folder} uses {', '.join(found)}, which the trainer does not run; use another model")
