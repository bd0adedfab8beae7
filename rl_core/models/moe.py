"""Mixture of experts with router replay: the experts that the engine used, with the trainer's own gates.

An engine's router and the trainer's see slightly different activations and pick different experts for some tokens;
the ratio of their probabilities then has nothing to do with the policy. Replaying the recorded experts removes that.
Source: Ma et al. 2025, "Stabilizing MoE RL by aligning training and inference routers" (arXiv:2510.11370): top-k is
overridden, the gates' gradient is kept. Ours adds a plausibility threshold: a recorded expert whose score is below
a share of the lowest of the router's own top-k is dropped, and the router's own candidates take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.functions import Linear, Norm, swiglu, swiglu_backward
from rl_core.models.parameters import Weight


@dataclass(slots=True)
class RoutingCounts:
    """What replay met, over all layers: rows (token-layers) with recorded experts, rows on which the router's own
    top-k is another set, and recorded experts dropped as implausible.
    """

    rows: int = 0
    disagreeing: int = 0
    dropped: int = 0

    def add(self, other: RoutingCounts) -> None:
        """Sum in place."""
        self.rows += other.rows
        self.disagreeing += other.disagreeing
        self.dropped += other.dropped


def choose_experts(
    scores: Tensor, recorded: Tensor | None, *, top_k: int, plausibility: float, counts: RoutingCounts
) -> Tensor:
    """The experts of each token: the recorded ones where plausible, the router's own candidates elsewhere.

    Shapes: scores [N, E] probabilities; recorded [N, K] with −1 for tokens that were not recorded; returns [N, K].
    """
    own_scores, own = torch.topk(scores, top_k, dim=-1)
    if recorded is None:
        return own
    present = (recorded >= 0).all(dim=-1, keepdim=True)
    safe = recorded.clamp(min=0)
    keep = present & (scores.gather(1, safe) >= plausibility * own_scores[:, -1:])
    # Kept experts come first, then all others by score: exactly the router's own candidates fill the gaps.
    priority = scores.clone()
    priority.scatter_add_(1, safe, keep.to(scores.dtype) * 2.0)
    chosen = torch.topk(priority, top_k, dim=-1).indices
    counts.rows += int(present.sum())
    counts.dropped += int((present & ~keep).sum())
    same = (safe.sort(dim=-1).values == own.sort(dim=-1).values).all(dim=-1, keepdim=True)
    counts.disagreeing += int((present & ~same).sum())
    return chosen


@dataclass(frozen=True, slots=True)
class _Share:
    """One expert's tokens. `rows` [n] of x; `slots` [n] of the flattened [N, K] gates."""

    expert: int
    rows: Tensor
    slots: Tensor


def _shares(chosen: Tensor, experts: int) -> list[_Share]:
    flat = chosen.flatten()
    slots = torch.argsort(flat, stable=True)
    sizes = torch.bincount(flat, minlength=experts).tolist()
    parts = torch.split(slots, sizes)
    return [_Share(e, part // chosen.shape[1], part) for e, part in enumerate(parts) if len(part)]


class Experts(torch.autograd.Function):
    """Σ gate · expert(x) over each token's chosen experts.

    Shapes: x [N, D] compute dtype, gates [N, K] fp32, chosen [N, K]; weights up [E, 2I, D], down [E, D, I];
    returns [N, D] fp32. Keeps x and the experts' gate_up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, chosen: Tensor, up: Weight, down: Weight) -> Tensor:
        """Sort tokens by expert, one product for each expert."""
        shares = _shares(chosen, up.value.shape[0])
        flat_gates = gates.flatten()
        out = torch.zeros(x.shape, dtype=gates.dtype)
        kept = []
        for share in shares:
            gate_up = torch.mm(x.index_select(0, share.rows), up.value[share.expert].t())
            y = torch.mm(swiglu(gate_up), down.value[share.expert].t())
            out.index_add_(0, share.rows, y * flat_gates[share.slots, None])
            kept.append(gate_up)
        ctx.save_for_backward(x, gates, *kept)
        ctx.shares, ctx.up, ctx.down = shares, up, down
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Gradients of x and gates; adds the experts'."""
        x, gates, *kept = ctx.saved_tensors
        flat_gates = gates.flatten()
        dx = torch.zeros_like(x)
        dgates = torch.zeros_like(flat_gates)
        for share, gate_up in zip(ctx.shares, kept, strict=True):
            up, down = _expert(ctx.up, share.expert), _expert(ctx.down, share.expert)
            dy = dout.index_select(0, share.rows)
            scaled = (dy * flat_gates[share.slots, None]).to(x.dtype)
            dh = torch.mm(dy.to(x.dtype), down.value)
            h = swiglu(gate_up)
            dgates[share.slots] = (dh.float() * h.float()).sum(-1)
            dgate_up, _ = swiglu_backward(dh * flat_gates[share.slots, None].to(x.dtype), gate_up)
            down.accumulate(scaled, h)
            up.accumulate(dgate_up, x.index_select(0, share.rows))
            dx.index_add_(0, share.rows, torch.mm(dgate_up, up.value))
        return dx, dgates.view(gates.shape), None, None, None


def _expert(weight: Weight, expert: int) -> Weight:
    return Weight(weight.value[expert], None if weight.grad is None else weight.grad[expert])


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """The weights of one sparse feed-forward block."""

    norm: Weight
    router: Weight
    up: Weight
    down: Weight


def sparse_feed_forward(
    x: Tensor,
    block: MoeBlock,
    recorded: Tensor | None,
    *,
    top_k: int,
    plausibility: float,
    eps: float,
    counts: RoutingCounts,
) -> tuple[Tensor, Tensor]:
    """Add to x its experts' outputs, gates renormalised. Shapes: x [N, D] → [N, D] and the experts used [N, K]."""
    normed: Tensor = Norm.apply(x, block.norm, eps)  # type: ignore[no-untyped-call]
    logits: Tensor = Linear.apply(normed, block.router)  # type: ignore[no-untyped-call]
    scores = torch.softmax(logits.float(), dim=-1)
    chosen = choose_experts(scores.detach(), recorded, top_k=top_k, plausibility=plausibility, counts=counts)
    gates = scores.gather(1, chosen)
    gates = gates / gates.sum(dim=-1, keepdim=True)
    mixed: Tensor = Experts.apply(normed, gates, chosen, block.up, block.down)  # type: ignore[no-untyped-call]
    return x + mixed, chosen
