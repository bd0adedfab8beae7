"""The differentiable forward of Llama and Mixtral models over packs of trees, for training.

Runs on CPU or any device torch can place the flat buffers on; equal to `transformers` in fp32 (tests say how closely).
Left out: dropout, sliding windows, scaled rotary positions, attention biases (refused when the folder is read).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.models.architecture import EMBEDDING, FINAL_NORM
from rl_core.models.attention import Rope, TreeAttention, make_rope
from rl_core.models.functions import Embed, Norm, NormLinear, ResidualLinear, ResidualSwiglu
from rl_core.models.head import TargetLogprobs
from rl_core.models.moe import MoeBlock, RoutingCounts, sparse_feed_forward
from rl_core.models.packing import Pack
from rl_core.models.parameters import Parameters, Weight


@dataclass(frozen=True, slots=True)
class Replay:
    """How recorded experts are used. `plausibility` 0 keeps every recorded expert."""

    enabled: bool = True
    plausibility: float = 0.0


@dataclass(frozen=True, slots=True)
class PackOutput:
    """Of each target, its logprob (differentiable) and the policy's entropy there. Shapes: [M], fp32, nats.

    `experts` [N, L, K] are those used, when asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    routing: RoutingCounts
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    norm: Weight
    qkv: Weight
    out: Weight
    mlp_norm: Weight
    gate_up: Weight | None
    down: Weight | None
    moe: MoeBlock | None


@dataclass(slots=True)
class _Routing:
    """What one forward needs to know of experts, and what it finds."""

    replay: Replay
    keep_experts: bool
    counts: RoutingCounts = field(default_factory=RoutingCounts)
    experts: list[Tensor] = field(default_factory=list)


class Transformer:
    """One policy: a view of `Parameters` with a forward. `loss.backward()` adds gradients to `parameters.grad`."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.arch = parameters.arch
        self._blocks = [self._block(layer) for layer in range(self.arch.layers)]
        self._embedding = parameters.weight(EMBEDDING)
        self._final_norm = parameters.weight(FINAL_NORM)
        self._head = parameters.weight(self.arch.head_name)

    def forward(
        self, pack: Pack, *, replay: Replay | None = None, train: bool, keep_experts: bool = False
    ) -> PackOutput:
        """Logprobs of the pack's targets. `train=False` keeps nothing for a backward."""
        routing = _Routing(replay or Replay(), keep_experts)
        with torch.set_grad_enabled(train):
            anchor = torch.zeros((), requires_grad=train)
            x: Tensor = Embed.apply(anchor, pack.tokens, self._embedding)  # type: ignore[no-untyped-call]
            rope = make_rope(self.arch, pack.positions)
            for layer, block in enumerate(self._blocks):
                x = self._run(block, x, rope, pack, layer, routing)
            last = x.index_select(0, pack.rows)
            h: Tensor = Norm.apply(last, self._final_norm, self.arch.norm_eps)  # type: ignore[no-untyped-call]
            logprobs, entropies = TargetLogprobs.apply(  # type: ignore[no-untyped-call]
                h, pack.targets, pack.temperatures, self._head, train
            )
        experts = torch.stack(routing.experts, dim=1) if routing.experts else None
        return PackOutput(logprobs, entropies, routing.counts, experts)

    def _run(self, block: _Block, x: Tensor, rope: Rope, pack: Pack, layer: int, routing: _Routing) -> Tensor:
        eps = self.arch.norm_eps
        qkv: Tensor = NormLinear.apply(x, block.norm, block.qkv, eps)  # type: ignore[no-untyped-call]
        heads: Tensor = TreeAttention.apply(qkv, rope, pack, self.arch)  # type: ignore[no-untyped-call]
        x = ResidualLinear.apply(x, heads, block.out)  # type: ignore[no-untyped-call]
        if block.moe is None:
            gate_up: Tensor = NormLinear.apply(x, block.mlp_norm, block.gate_up, eps)  # type: ignore[no-untyped-call]
            mixed: Tensor = ResidualSwiglu.apply(x, gate_up, block.down)  # type: ignore[no-untyped-call]
            return mixed
        recorded = pack.routes[:, layer] if pack.routes is not None and routing.replay.enabled else None
        x, chosen = sparse_feed_forward(
            x,
            block.moe,
            recorded,
            top_k=self.arch.top_k,
            plausibility=routing.replay.plausibility,
            eps=eps,
            counts=routing.counts,
        )
        if routing.keep_experts:
            routing.experts.append(chosen)
        return x

    def _block(self, layer: int) -> _Block:
        p, arch = self.parameters, self.arch
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        mlp_norm = p.weight(f"{prefix}.post_attention_layernorm.weight")
        dense = not arch.experts
        wide = (2 * arch.intermediate, arch.hidden)
        return _Block(
            norm=p.weight(f"{prefix}.input_layernorm.weight"),
            qkv=p.fused(f"{attention}.q_proj.weight", f"{attention}.v_proj.weight", (arch.qkv_rows, arch.hidden)),
            out=p.weight(f"{attention}.o_proj.weight"),
            mlp_norm=mlp_norm,
            gate_up=p.fused(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight", wide) if dense else None,
            down=p.weight(f"{prefix}.mlp.down_proj.weight") if dense else None,
            moe=None if dense else self._moe(f"{prefix}.block_sparse_moe", mlp_norm),
        )

    def _moe(self, block: str, norm: Weight) -> MoeBlock:
        p, arch = self.parameters, self.arch
        first, last = f"{block}.experts.0", f"{block}.experts.{arch.experts - 1}"
        return MoeBlock(
            norm=norm,
            router=p.weight(f"{block}.gate.weight"),
            up=p.fused(f"{first}.w1.weight", f"{last}.w3.weight", (arch.experts, 2 * arch.intermediate, arch.hidden)),
            down=p.fused(f"{first}.w2.weight", f"{last}.w2.weight", (arch.experts, arch.hidden, arch.intermediate)),
        )
