"""Named parameters over flat buffers: fp32 master weights, what the matrix products read, and fp32 gradients.

One flat buffer each, so that clipping, the optimiser and the cast for publishing are single passes, and so that
neighbours in storage (q, k, v; gate, up; a layer's experts) are one matrix without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from rl_core.models.architecture import Architecture
from rl_core.models.checkpoint import check_names


class ComputeDtype(StrEnum):
    """What the matrix products run in. The weights are the published bf16 ones either way."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return torch.bfloat16 if self is ComputeDtype.BF16 else torch.float32


def pick_compute_dtype() -> ComputeDtype:
    """bf16 where the processor multiplies it in hardware, else fp32 (ten times faster there, and exact).

    Decided by capability, not by a timing: a restart on the same machine must decide alike.
    """
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return ComputeDtype.BF16
    return ComputeDtype.FP32


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix or vector as an operation sees it: the values it reads and the fp32 buffer its gradient adds to."""

    value: Tensor
    grad: Tensor | None

    def accumulate(self, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x to grad. Shapes: dy [T, O], x [T, I], grad [O, I]."""
        if self.grad is None:
            return
        if dy.dtype == self.grad.dtype:
            self.grad.addmm_(dy.t(), x)
        else:
            self.grad.add_(torch.mm(dy.t(), x))


class Parameters:
    """All parameters of one model. `trainable=False` keeps only the values to compute with (a reference policy).

    `master` holds fp32; `compute` holds the bf16 rounding of it in the compute dtype: the forward runs on exactly the
    weights that are published, and gradients pass straight through the rounding to the master.
    """

    def __init__(
        self, arch: Architecture, tensors: dict[str, Tensor], *, dtype: ComputeDtype, trainable: bool = True
    ) -> None:
        """Raises: ModelError when `tensors` do not fit the architecture."""
        self.arch = arch
        self.dtype = dtype
        self.table = arch.tensor_table()
        check_names(tensors, self.table.items())
        self._offsets: dict[str, int] = {}
        total = 0
        for name, shape in self.table.items():
            self._offsets[name] = total
            total += prod(shape)
        self.count = total
        self.compute = torch.empty(total, dtype=dtype.torch)
        self.master = torch.empty(total if trainable else 0)
        self.grad = torch.zeros(total) if trainable else None
        target = self.master if trainable else self.compute
        for name, tensor in tensors.items():
            self.view(target, name).copy_(tensor if trainable else tensor.to(torch.bfloat16))
        if trainable:
            self.refresh()

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The tensor `name` inside a flat buffer of this layout."""
        shape = self.table[name]
        offset = self._offsets[name]
        return flat[offset : offset + prod(shape)].view(shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """All tensors inside a flat buffer, by checkpoint name; views, no copies."""
        return {name: self.view(flat, name) for name in self.table}

    def weight(self, name: str) -> Weight:
        """One tensor as a `Weight`."""
        return self._weight(self._offsets[name], self.table[name])

    def fused(self, first: str, last: str, shape: tuple[int, ...]) -> Weight:
        """The neighbours from `first` to `last` as one tensor of `shape`."""
        start, end = self._offsets[first], self._offsets[last] + prod(self.table[last])
        if prod(shape) != end - start:
            raise AssertionError(f"{first} … {last} are not neighbours of {shape}")
        return self._weight(start, shape)

    def _weight(self, offset: int, shape: tuple[int, ...]) -> Weight:
        end = offset + prod(shape)
        grad = None if self.grad is None else self.grad[offset:end].view(shape)
        return Weight(self.compute[offset:end].view(shape), grad)

    def rounded(self) -> Tensor:
        """The master weights rounded to bf16, as published. Shape: [count]."""
        return self.master.detach().to(torch.bfloat16)

    def current(self) -> Tensor:
        """The bf16 weights that `compute` holds now (exact in either compute dtype). Shape: [count]."""
        return self.compute.to(torch.bfloat16, copy=True)

    def refresh(self) -> None:
        """Make `compute` follow the master."""
        self.compute.copy_(self.rounded())
