"""The operations of a transformer block with gradients that add straight into the fp32 buffers.

Each forward keeps the least that its backward needs: norms and SwiGLU are computed again. The residual stream is
fp32; matrix products run in the compute dtype. Weight gradients are a side effect of `backward`, so a graph is run
backward at most once, and packs add up without a second buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.parameters import Weight


class Embed(torch.autograd.Function):
    """Rows of the embedding as the fp32 residual stream. Shapes: tokens [N] → [N, D].

    `anchor` is any tensor that requires a gradient: it puts the weights' side effects into the graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, table: Weight) -> Tensor:
        """Look up."""
        ctx.save_for_backward(tokens)
        ctx.table = table
        return table.value.index_select(0, tokens).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        """Add into the rows."""
        (tokens,) = ctx.saved_tensors
        if ctx.table.grad is not None:
            ctx.table.grad.index_add_(0, tokens, dx)
        return None, None, None


def _normalise(x: Tensor, eps: float) -> Tensor:
    """1 / RMS of each row, fp32. Shapes: [N, D] → [N, 1]."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps))


def _norm_backward(dn: Tensor, x: Tensor, rstd: Tensor, scale: Weight) -> Tensor:
    """Gradient of the residual stream through RMSNorm; adds the scale's. Shapes: dn, x [N, D]."""
    xhat = x * rstd
    dn = dn.float()
    if scale.grad is not None:
        scale.grad.add_((dn * xhat).sum(0))
    dxhat = dn * scale.value.float()
    return (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)).mul_(rstd)


class Norm(torch.autograd.Function):
    """RMSNorm. Source: Zhang & Sennrich 2019 (arXiv:1910.07467). Shapes: [N, D] fp32 → [N, D] compute dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Weight, eps: float) -> Tensor:
        """Normalise and scale."""
        rstd = _normalise(x, eps)
        ctx.save_for_backward(x, rstd)
        ctx.scale = scale
        return (x * rstd).to(scale.value.dtype) * scale.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x."""
        x, rstd = ctx.saved_tensors
        return _norm_backward(dy, x, rstd, ctx.scale), None, None


class NormLinear(torch.autograd.Function):
    """RMSNorm, then a product. Shapes: x [N, D] fp32, weight [O, D] → [N, O]. Keeps x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Weight, weight: Weight, eps: float) -> Tensor:
        """Normalise, scale, multiply."""
        rstd = _normalise(x, eps)
        ctx.save_for_backward(x, rstd)
        ctx.scale, ctx.weight = scale, weight
        normed = (x * rstd).to(scale.value.dtype) * scale.value
        return torch.mm(normed, weight.value.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of x; adds those of scale and weight."""
        x, rstd = ctx.saved_tensors
        normed = (x * rstd).to(dy.dtype) * ctx.scale.value
        ctx.weight.accumulate(dy, normed)
        return _norm_backward(torch.mm(dy, ctx.weight.value), x, rstd, ctx.scale), None, None, None


class Linear(torch.autograd.Function):
    """A product. Shapes: x [N, I], weight [O, I] → [N, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.mm(x, weight.value.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Gradient of x; adds the weight's."""
        (x,) = ctx.saved_tensors
        ctx.weight.accumulate(dy, x)
        return torch.mm(dy, ctx.weight.value), None


def residual_product(x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """The sum x + h weightᵀ, in fp32. Shapes: x [N, D], h [N, I], weight [D, I]."""
    if h.dtype == x.dtype:
        return torch.addmm(x, h, weight.t())
    return x + torch.mm(h, weight.t())


class ResidualLinear(torch.autograd.Function):
    """x + h weightᵀ. Shapes: x [N, D] fp32, h [N, I], weight [D, I] → [N, D] fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, weight: Weight) -> Tensor:
        """Multiply and add."""
        ctx.save_for_backward(h)
        ctx.weight = weight
        return residual_product(x, h, weight.value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and h; adds the weight's."""
        (h,) = ctx.saved_tensors
        low = dy.to(h.dtype)
        ctx.weight.accumulate(low, h)
        return dy, torch.mm(low, ctx.weight.value), None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. Source: Shazeer 2020 (arXiv:2002.05202). Shapes: [N, 2I] → [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate_up [N, 2I], and h = swiglu(gate_up) computed again [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate)
    dgate_up = torch.empty_like(gate_up)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    dup.copy_(dh * activated)
    dgate.copy_(torch.ops.aten.silu_backward(dh * up, gate))
    return dgate_up, activated.mul_(up)


class ResidualSwiglu(torch.autograd.Function):
    """x + swiglu(gate_up) weightᵀ. Shapes: x [N, D] fp32, gate_up [N, 2I], weight [D, I] → [N, D] fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, weight: Weight) -> Tensor:
        """Activate, multiply, add."""
        ctx.save_for_backward(gate_up)
        ctx.weight = weight
        return residual_product(x, swiglu(gate_up), weight.value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and gate_up; adds the weight's."""
        (gate_up,) = ctx.saved_tensors
        low = dy.to(gate_up.dtype)
        dgate_up, h = swiglu_backward(torch.mm(low, ctx.weight.value), gate_up)
        ctx.weight.accumulate(low, h)
        return dy, dgate_up, None
