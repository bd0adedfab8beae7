"""Memory that goes back to the system whole, at once, when nobody holds it. A heap keeps much of what is freed.

Weights and frames lie in it: an update holds two versions and little more only if what it lets go of is gone.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch

_LEAST_BYTES: Final = 1 << 20  # a system has only so many mappings


def mapped(size_bytes: int) -> memoryview:
    """Zeros, on pages of their own."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of no particular content."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mapped(size), dtype=torch.uint8).view(dtype).view(tuple(shape))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return empty_tensor(tensor.shape, tensor.dtype).copy_(tensor.detach())
