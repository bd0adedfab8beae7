"""FP8 E4M3 with one scale for each output channel, or for each block of 128 x 128.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2209.05433), E4M3 without infinities, largest value 448;
blocks as in DeepSeek-V3 (2412.19437, section 3.3.2). Ours differs in that scales are powers of two, see `scales`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rl_core.formats.blocks import combined, maxima
from rl_core.formats.scales import exponent_within, power_of_two

LARGEST: Final = 448.0
BLOCK: Final = 128
_LOWEST, _HIGHEST = -126, 119  # 2^128 / 448 is below 2^120; the inverse of the lowest scale is a float32 too


def quantise(matrix: Tensor, *, rows: int, columns: int | None) -> tuple[Tensor, Tensor]:
    """E4M3 elements, and the scales that multiply them. `columns` None: one block spans the whole row.

    Each element is scaled without rounding and then rounded once, to nearest, ties to even.
    Shapes: float32 [N, K] → float8_e4m3fn [N, K], float32 [⌈N / rows⌉, ⌈K / columns⌉].
    """
    columns = columns or max(1, matrix.shape[1])
    exponent = exponent_within(maxima(matrix, rows=rows, columns=columns), LARGEST, lowest=_LOWEST, highest=_HIGHEST)
    scaled = combined(torch.mul, matrix, power_of_two(-exponent), rows=rows, columns=columns)
    return scaled.to(torch.float8_e4m3fn), power_of_two(exponent)


def dequantise(elements: Tensor, scales: Tensor, *, rows: int, columns: int | None) -> Tensor:
    """The numbers that the elements stand for, as float32. Shapes: [N, K], [⌈N / rows⌉, ⌈K / columns⌉] → [N, K]."""
    columns = columns or max(1, elements.shape[1])
    return combined(torch.mul, elements.to(torch.float32), scales, rows=rows, columns=columns)
