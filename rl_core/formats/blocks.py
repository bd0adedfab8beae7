"""Matrices in blocks that share a number: what the largest of each is, and what each element becomes by it.

A matrix whose sides are no multiples of its blocks' is padded with zeros meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def maxima(matrix: Tensor, *, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each block. Shapes: [N, K] → [⌈N / rows⌉, ⌈K / columns⌉]."""
    return _blocks(matrix, rows=rows, columns=columns).abs().amax(dim=(1, 3))


def combined(
    operation: Callable[[Tensor, Tensor], Tensor], matrix: Tensor, values: Tensor, *, rows: int, columns: int
) -> Tensor:
    """`operation` of each element and its block's value. Shapes: [N, K], [⌈N / rows⌉, ⌈K / columns⌉] → [N, K]."""
    blocks = _blocks(matrix, rows=rows, columns=columns)
    done = operation(blocks, values[:, None, :, None])
    return done.reshape(blocks.shape[0] * rows, -1)[: matrix.shape[0], : matrix.shape[1]] if matrix.numel() else matrix


def _blocks(matrix: Tensor, *, rows: int, columns: int) -> Tensor:
    """Shapes: [N, K] → [⌈N / rows⌉, rows, ⌈K / columns⌉, columns]."""
    missing_rows, missing_columns = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if missing_rows or missing_columns:
        matrix = torch.nn.functional.pad(matrix, (0, missing_columns, 0, missing_rows))
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)
