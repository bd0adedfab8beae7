"""Weights as the engine computes with them: immutable, packed, and derived from each other by changed tensors.

A set keeps plain copies of the checkpoint's tensors beside the packed ones. Deriving a new set copies what changed and
packs only the groups it touches; everything else is shared. Flipping from one set to another is one assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.engines.config import ModelConfig
from rl_core.engines.linear import Linear, make_linear
from rl_core.errors import ModelError

# Below this many weights in all experts of a layer, computing every expert costs less than sorting tokens by expert.
FUSED_EXPERTS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """A gated feed-forward layer."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """Routed experts. When `fused`, each tuple holds one layer over all experts side by side."""

    router: Tensor
    fused: bool
    gate: tuple[Linear, ...]
    up: tuple[Linear, ...]
    down: tuple[Linear, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    ffn_norm: Tensor
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class WeightSet:
    """Everything a forward pass needs. Never changed after it is built; too large to print or compare."""

    config: ModelConfig
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear

    @classmethod
    def build(cls, config: ModelConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> WeightSet:
        """Pack a checkpoint's tensors, taking copies. Raises: ModelError when they do not fit the config."""
        expected = dict(config.expected_tensors())
        missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        if missing or extra:
            raise ModelError(f"the weights do not fit config.json: missing {missing[:3]}, unexpected {extra[:3]}")
        _check_shapes(expected, tensors)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return _Packer(config=config, dtype=dtype, tensors=copies, previous=None, changed=frozenset(copies)).pack()

    def derive(self, changed: Mapping[str, Tensor]) -> WeightSet:
        """The set with some tensors replaced. Shares everything else. Raises: ModelError."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        unknown = sorted(set(changed) - set(expected))
        if unknown:
            raise ModelError(f"the update names tensors that the model lacks: {unknown[:3]}")
        _check_shapes(expected, changed)
        copies = {name: tensor.detach().to(self.tensors[name].dtype, copy=True) for name, tensor in changed.items()}
        merged = {**self.tensors, **copies}
        packer = _Packer(
            config=self.config, dtype=self.dtype, tensors=merged, previous=self, changed=frozenset(changed)
        )
        return packer.pack()


def _check_shapes(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}; config.json wants {expected[name]}")


@dataclass(frozen=True, slots=True)
class _Packer:
    """Builds a set, taking from `previous` each part whose tensors did not change."""

    config: ModelConfig
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    previous: WeightSet | None
    changed: frozenset[str]

    def pack(self) -> WeightSet:
        head = "model.embed_tokens" if self.config.tied else "lm_head"
        old = self.previous
        return WeightSet(
            config=self.config,
            dtype=self.dtype,
            tensors=self.tensors,
            embedding=self.tensors["model.embed_tokens.weight"],
            layers=tuple(self._layer(index) for index in range(self.config.layers)),
            norm=self._vector("model.norm.weight"),
            head=self._linear((head,), old.head if old else None),
        )

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        old = self.previous.layers[index] if self.previous else None
        attention = f"{prefix}.self_attn"
        names = tuple(f"{attention}.{part}_proj" for part in ("q", "k", "v"))
        ffn = self._experts if self.config.routed else self._dense
        return LayerWeights(
            attention_norm=self._vector(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(names, old.qkv if old else None),
            out=self._linear((f"{attention}.o_proj",), old.out if old else None),
            ffn_norm=self._vector(f"{prefix}.post_attention_layernorm.weight"),
            ffn=ffn(prefix, old.ffn if old else None),
        )

    def _dense(self, prefix: str, old: DenseFfn | MoeFfn | None) -> DenseFfn:
        known = old if isinstance(old, DenseFfn) else None
        return DenseFfn(
            gate=self._linear((f"{prefix}.mlp.gate_proj",), known.gate if known else None),
            up=self._linear((f"{prefix}.mlp.up_proj",), known.up if known else None),
            down=self._linear((f"{prefix}.mlp.down_proj",), known.down if known else None),
        )

    def _experts(self, prefix: str, old: DenseFfn | MoeFfn | None) -> MoeFfn:
        known = old if isinstance(old, MoeFfn) else None
        config = self.config
        base = f"{prefix}.block_sparse_moe"
        fused = config.experts * 3 * config.intermediate_size * config.hidden_size <= FUSED_EXPERTS_MAX

        def part(which: str, before: tuple[Linear, ...] | None, axis: int) -> tuple[Linear, ...]:
            names = [f"{base}.experts.{expert}.{which}" for expert in range(config.experts)]
            if fused:
                return (self._linear(tuple(names), before[0] if before else None, axis=axis),)
            return tuple(self._linear((name,), before[index] if before else None) for index, name in enumerate(names))

        return MoeFfn(
            router=self._vector(f"{base}.gate.weight"),
            fused=fused,
            gate=part("w1", known.gate if known else None, 0),
            up=part("w3", known.up if known else None, 0),
            down=part("w2", known.down if known else None, 1),
        )

    def _vector(self, name: str) -> Tensor:
        return self.tensors[name].to(self.dtype)

    def _linear(self, modules: tuple[str, ...], old: Linear | None, *, axis: int = 0) -> Linear:
        """One layer over the modules' weights, side by side along `axis` (0: outputs, 1: inputs)."""
        if old is not None and self.changed.isdisjoint(self._names(modules)):
            return old
        weights = [self.tensors[f"{module}.weight"].to(self.dtype) for module in modules]
        biases = [self.tensors[name].to(self.dtype) for name in self._names(modules) if name.endswith(".bias")]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights, dim=axis)
        return make_linear(weight, torch.cat(biases) if biases else None)

    def _names(self, modules: tuple[str, ...]) -> Iterator[str]:
        for module in modules:
            yield f"{module}.weight"
            if f"{module}.bias" in self.tensors:
                yield f"{module}.bias"
