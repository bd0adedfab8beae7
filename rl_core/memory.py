"""Memory that goes back to the system whole, at once, when nobody holds it. A heap keeps much of what is freed.

Weights and frames lie in it: an update holds two versions and little more only if what it lets go of is gone.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch

_LEAST_BYTES: Final = 1 << 20  # a system has only so many mappings
_LEAST_BLOCK: Final = 1 << 18  # bytes
_M_MMAP_THRESHOLD: Final = -3  # of mallopt(3)


def give_blocks_back() -> None:
    """From now on, large blocks that this process frees go back to the system at once, as if they had been `mapped`.

    For processes that work on weights once in a while: the system clears each such block anew, which would slow down a
    trainer. Where there is no glibc, nothing happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST_BLOCK)


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
