"""Linear layers with weights packed once for the CPU's matrix multiplication.

oneDNN's packed operators are private to PyTorch (its compiler uses them), so they are probed at start and the public
`F.linear` takes their place where they are missing or refuse the dtype. They also fold the activation, the product
of a gated unit and the residual sum into the multiplication.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rl_core.engines.protocol import ComputeDtype


class Linear(Protocol):
    """`y = x Wᵀ + b` with the epilogues that a decoder needs. Shapes: x `[M, in]`, y `[M, out]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """The plain product."""
        ...

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`: a residual."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product: the gate of a gated unit."""
        ...

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other`: a gated unit's second half."""
        ...


class PackedLinear:
    """A linear layer on oneDNN's packed weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The plain product."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "swish", [], "")
        return y

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return y

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "mul")
        return y


class PlainLinear:
    """A linear layer on public operators."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The plain product."""
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return F.silu(self(x))

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other`."""
        return self(x).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other`."""
        return self(x).mul_(other)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether packed linears work for `dtype` on this machine, and give what `F.linear` gives."""
    generator = torch.Generator().manual_seed(0)
    x, weight, other = (torch.randn(size, generator=generator).to(dtype) for size in ((3, 64), (48, 64), (3, 48)))
    tolerance = 1e-4 if dtype is torch.float32 else 0.25
    try:
        packed, plain = PackedLinear(weight), PlainLinear(weight)
        pairs = (
            (packed(x), plain(x)),
            (packed.silu(x), plain.silu(x)),
            (packed.add(x, other), plain.add(x, other)),
            (packed.mul(x, other), plain.mul(x, other)),
        )
        return all(torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance) for a, b in pairs)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The best linear layer for this weight's dtype here."""
    return PackedLinear(weight, bias) if packs(weight.dtype) else PlainLinear(weight, bias)


def choose_dtype(wanted: ComputeDtype, stored: torch.dtype) -> torch.dtype:
    """What to compute in. AUTO takes bfloat16 only where the CPU has matrix instructions for it.

    Widening bfloat16 weights to float32 changes no weight; without such instructions it is also several times faster.
    """
    if wanted is ComputeDtype.FLOAT32:
        return torch.float32
    if wanted is ComputeDtype.BFLOAT16:
        return torch.bfloat16
    return torch.bfloat16 if stored is torch.bfloat16 and packs(torch.bfloat16) else torch.float32
