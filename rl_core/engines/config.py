"""What a model folder's `config.json` says of the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rl_core.errors import ModelError


class Architecture(StrEnum):
    """The forms of decoder that the embedded engine computes."""

    LLAMA = "llama"  # dense
    MIXTRAL = "mixtral"  # mixture of experts


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a decoder. Field names follow Hugging Face where they mean the same."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    experts: int
    top_k: int
    rope: dict[str, Any]
    raw: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return self.architecture is Architecture.MIXTRAL

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`. Raises: ModelError."""
        try:
            return cls._read(dict(raw))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"config.json lacks or misstates {error}") from error

    @classmethod
    def _read(cls, raw: dict[str, Any]) -> ModelConfig:
        architecture = _architecture(raw)
        routed = architecture is Architecture.MIXTRAL
        heads = int(raw["num_attention_heads"])
        positions = int(raw.get("max_position_embeddings") or 2048)
        config = cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            rms_eps=float(raw["rms_norm_eps"]),
            # Below the window sliding attention is plain attention; longer sequences are refused.
            max_positions=min(positions, int(raw.get("sliding_window") or positions)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            experts=int(raw["num_local_experts"]) if routed else 0,
            top_k=int(raw["num_experts_per_tok"]) if routed else 0,
            rope=_rope(raw),
            raw=raw,
        )
        if config.heads % config.kv_heads:
            raise ModelError(f"{config.heads} query heads do not divide into {config.kv_heads} key/value heads")
        return config

    def expected_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of a checkpoint of this model."""
        width, heads, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, width)
        yield "model.norm.weight", (width,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, width)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (width,)
            yield f"{prefix}.post_attention_layernorm.weight", (width,)
            for name, rows, columns in (("q", heads, width), ("k", kv, width), ("v", kv, width), ("o", width, heads)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (rows, columns)
                if self.attention_bias:
                    yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
            yield from self._expected_ffn(prefix)

    def _expected_ffn(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, inner = self.hidden_size, self.intermediate_size
        if not self.routed:
            for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
                yield f"{prefix}.mlp.{name}_proj.weight", (rows, columns)
                if self.mlp_bias:
                    yield f"{prefix}.mlp.{name}_proj.bias", (rows,)
            return
        yield f"{prefix}.block_sparse_moe.gate.weight", (self.experts, width)
        for expert in range(self.experts):
            base = f"{prefix}.block_sparse_moe.experts.{expert}"
            yield f"{base}.w1.weight", (inner, width)
            yield f"{base}.w2.weight", (width, inner)
            yield f"{base}.w3.weight", (inner, width)


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    kind = raw.get("model_type")
    try:
        architecture = Architecture(str(kind))
    except ValueError as error:
        known = ", ".join(Architecture)
        raise ModelError(f"model_type {kind!r} is not supported by the embedded engine; supported: {known}") from error
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported by the embedded engine; supported: silu")
    return architecture


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters in transformers 5's form, also from the older `rope_theta` and `rope_scaling`."""
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, dict):
        return {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": float(raw.get("rope_theta") or 10000.0), **scaling}
