"""Tensors as flat arrays of unsigned integer words. Every comparison in this package is of these words.

Floats are never compared: −0 equals +0 and NaN equals nothing, so a float comparison loses bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.errors import ModelError

Words = NDArray[np.unsignedinteger[Any]]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Tensors = Mapping[str, torch.Tensor]

# safetensors' own tags, so that a manifest speaks the language of Hugging Face checkpoints.
DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # two in an element: shapes are torch's, of pairs
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_TAGS: Final = {dtype: tag for tag, dtype in DTYPES.items()}
_WORDS: Final[dict[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def dtype_tag(tensor: torch.Tensor) -> str:
    """The safetensors tag of a tensor's dtype. Raises: ModelError for a dtype that checkpoints do not hold."""
    tag = _TAGS.get(tensor.dtype)
    if tag is None:
        raise ModelError(f"tensors of dtype {tensor.dtype} cannot be shipped; convert to one of {', '.join(DTYPES)}")
    return tag


def word_dtype(tag: str) -> np.dtype[Any]:
    """The unsigned integer type as wide as one element of dtype `tag`."""
    width: np.dtype[Any] = np.dtype(_WORDS[DTYPES[tag].itemsize])
    return width


def words_of(tensor: torch.Tensor) -> Words:
    """A flat view of a contiguous CPU tensor's memory as integer words `[numel]`, sharing storage.

    Raises: ModelError when no view exists (another device, gaps in memory): make it `.cpu().contiguous()` first.
    """
    tag = dtype_tag(tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.layout != torch.strided:
        raise ModelError("weights must be dense contiguous CPU tensors; call .cpu().contiguous() first")
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, word_dtype(tag))
    return flat.view(torch.uint8).numpy().view(word_dtype(tag))


def numel(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)


def total_bytes(tensors: Tensors) -> int:
    """Bytes of all tensors: what a full transfer costs."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
