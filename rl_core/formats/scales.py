"""Powers of two as scales: chosen from a maximum with integers, applied without rounding.

A scale that is a power of two costs a floating-point format range, not precision, and moves only when the largest
element of its block crosses a bound, so that a small step of training leaves nearly all scales as they were.
Source: OCP Microscaling Formats (MX) v1.0, section 6.3; UE8M0 scales as in DeepSeek-V3.1's FP8 weights.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MANTISSA_BITS: Final = 23
_MANTISSA: Final = (1 << _MANTISSA_BITS) - 1
_BIAS: Final = 127


def exponent_within(maximum: Tensor, limit: float, *, lowest: int, highest: int) -> Tensor:
    """The least k, as int32, for which `maximum` · 2^-k does not exceed `limit`, kept within `lowest` to `highest`.

    Shapes: any. `maximum` is float32, finite and not below zero; 0 and subnormal numbers give `lowest`.
    """
    bits = maximum.contiguous().view(torch.int32)
    bound = int(torch.tensor(limit, dtype=torch.float32).view(torch.int32))
    exponent = (bits >> _MANTISSA_BITS) - (bound >> _MANTISSA_BITS)
    above = (bits & _MANTISSA) > (bound & _MANTISSA)
    exponent = exponent + above.to(torch.int32)
    subnormal = bits < (1 << _MANTISSA_BITS)
    return torch.where(subnormal, lowest, exponent).clamp(lowest, highest).to(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exact for exponents from -126 to 127."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).to(torch.int32).view(torch.float32)


def floor_exponent(maximum: Tensor) -> Tensor:
    """floor(log2(maximum)) as int32, of float32 numbers that are not below zero; -127 for 0 and subnormal ones."""
    return (maximum.contiguous().view(torch.int32) >> _MANTISSA_BITS) - _BIAS
