"""FP4 E2M1 in blocks of a row: MXFP4 (32 elements, a power of two) and NVFP4 (16 elements, an E4M3 scale).

Two elements share a byte, the first in its low half; a row of odd length ends in a half of zero.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 6.3; NVIDIA, "Pretraining LLMs with NVFP4" (2509.25149).
Ours differs in that the scale of an NVFP4 tensor is a power of two, see `scales`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rl_core.formats.blocks import combined, maxima
from rl_core.formats.scales import exponent_within, floor_exponent, power_of_two

MX_BLOCK: Final = 32
NV_BLOCK: Final = 16
LARGEST: Final = 6.0
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EMAX: Final = 2  # the exponent of the largest element
_E8M0_BIAS: Final = 127
_LARGEST_SCALE: Final = 448.0
_LEAST_SCALE: Final = 2.0**-9  # the least that E4M3 holds above zero


def quantise_mx(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4: packed elements, and scales as biased exponents (E8M0). Elements beyond 6 are 6.

    Shapes: float32 [N, K] → uint8 [N, ⌈K / 2⌉], uint8 [N, ⌈K / 32⌉].
    """
    exponent = (floor_exponent(maxima(matrix, rows=1, columns=MX_BLOCK)) - _EMAX).clamp(min=-126)
    scaled = combined(torch.mul, matrix, power_of_two(-exponent), rows=1, columns=MX_BLOCK)
    return _packed(_codes(scaled)), (exponent + _E8M0_BIAS).to(torch.uint8)


def dequantise_mx(packed: Tensor, scales: Tensor, *, columns: int) -> Tensor:
    """The numbers that MXFP4 elements stand for, as float32. Shapes: [N, ⌈K / 2⌉], [N, ⌈K / 32⌉] → [N, K]."""
    elements = _unpacked(packed, columns=columns)
    factors = power_of_two(scales.to(torch.int32) - _E8M0_BIAS)
    return combined(torch.mul, elements, factors, rows=1, columns=MX_BLOCK)


def divisor_nv(largest: Tensor) -> Tensor:
    """What NVFP4 scales are divided by, a power of two for the tensor, of its largest magnitude. Shapes: [] → [1]."""
    return power_of_two(-exponent_within(largest.reshape(1), _LARGEST_SCALE * LARGEST, lowest=-126, highest=116))


def quantise_nv(matrix: Tensor, *, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: packed elements and E4M3 scales. `divisor` is the whole tensor's, of which `matrix` may be some rows.

    Shapes: float32 [N, K], [1] → uint8 [N, ⌈K / 2⌉], float8_e4m3fn [N, ⌈K / 16⌉].
    """
    block_maxima = maxima(matrix, rows=1, columns=NV_BLOCK) * divisor
    scales = (block_maxima / LARGEST).clamp(_LEAST_SCALE, _LARGEST_SCALE).to(torch.float8_e4m3fn)
    scaled = combined(torch.div, matrix * divisor, scales.to(torch.float32), rows=1, columns=NV_BLOCK)
    return _packed(_codes(scaled)), scales


def dequantise_nv(packed: Tensor, scales: Tensor, divisor: Tensor, *, columns: int) -> Tensor:
    """The numbers that NVFP4 elements stand for, as float32. Shapes: [N, ⌈K / 2⌉], [N, ⌈K / 16⌉], [1] → [N, K]."""
    elements = _unpacked(packed, columns=columns)
    return combined(torch.mul, elements, scales.to(torch.float32), rows=1, columns=NV_BLOCK) / divisor


def _codes(values: Tensor) -> Tensor:
    """E2M1 codes of float32 numbers: to nearest, ties to the even code; sign, two bits of exponent, one of fraction."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, upwards in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (size >= bound) if upwards else (size > bound)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _packed(codes: Tensor) -> Tensor:
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Tensor, *, columns: int) -> Tensor:
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)[:, :columns].long()
    values = torch.tensor(_VALUES)[codes & 0x07]
    return torch.where((codes & 0x08) > 0, -values, values)
