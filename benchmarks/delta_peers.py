"""What others ship as deltas of bf16 weights, written as their projects do it, with numpy; and what is the limit.

Peers compare the whole model as one array, in blocks that stay in cache: the fastest that numpy does. `COMPILED` are
the same formats with our own compiled comparison, which none of their projects has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.detection import STRETCH, find_changed
from rl_core.delta.masks import AT_ONCE, differing
from rl_core.delta.words import Words

_BLOCK: Final = 1 << 18
Counts = NDArray[np.int64]
Positions = NDArray[np.signedinteger[Any]]
Compare = Callable[[Words, Words], Positions]


def changed_positions(old: Words, new: Words) -> Positions:
    """Where two arrays differ, ascending."""
    mask = np.empty(_BLOCK, np.bool_)
    found = []
    for start in range(0, old.size, _BLOCK):
        was, now = old[start : start + _BLOCK], new[start : start + _BLOCK]
        found.append(np.flatnonzero(np.not_equal(was, now, out=mask[: now.size])) + start)
    return np.concatenate(found)


def compiled_positions(old: Words, new: Words) -> Positions:
    """The same as `changed_positions`, as our encoder finds them."""
    positions, differences = np.empty(old.size + STRETCH, np.int32), np.empty(old.size + STRETCH, old.dtype)
    _, listed = find_changed(old, new, 0, 0, 0, positions, differences)
    return positions[:listed]


@compiled
def read_both(old: Words, new: Words) -> int:
    """Whether two arrays differ, found by reading all of both: nothing that compares them takes less time."""
    changed = np.uint64(0)
    for at in range(0, old.size - AT_ONCE, AT_ONCE):
        changed |= differing(old, new, at)
    return int(changed != np.uint64(0))


def coo(old: Words, new: Words, compare: Compare = changed_positions) -> bytes:
    """int32 index and bf16 value, as TRL, vLLM and grail send them: not compressed."""
    positions = compare(old, new)
    return positions.astype(np.int32).tobytes() + new[positions].tobytes()


def coo_zstd(old: Words, new: Words, compare: Compare = changed_positions) -> bytes:
    """The same under zstd-1."""
    return zstandard.ZstdCompressor(level=1).compress(coo(old, new, compare))


def xor_zstd(old: Words, new: Words) -> bytes:
    """The exclusive or of all words under zstd-1."""
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).view(np.uint8).data)


def pulse(old: Words, new: Words, compare: Compare = changed_positions) -> bytes:
    """16-bit gaps (a zero-difference entry bridges longer ones) and bf16 values under zstd-1, like PULSE and slime."""
    positions = compare(old, new)
    gaps = np.diff(positions, prepend=0)
    if gaps.size and gaps.max() > 0xFFFF:
        bridges = [np.arange(p - g + 0xFFFF, p, 0xFFFF) for p, g in zip(positions, gaps, strict=True) if g > 0xFFFF]
        positions = np.union1d(positions, np.concatenate(bridges))
        gaps = np.diff(positions, prepend=0)
    return zstandard.ZstdCompressor(level=1).compress(gaps.astype(np.uint16).tobytes() + new[positions].tobytes())


COMPRESSED: Final[dict[str, Callable[[Words, Words], bytes]]] = {
    "pulse": pulse,
    "coo_zstd": coo_zstd,
    "xor_zstd": xor_zstd,
}
COMPILED: Final[dict[str, Callable[[Words, Words], bytes]]] = {
    "pulse_compiled": partial(pulse, compare=compiled_positions),
    "coo_zstd_compiled": partial(coo_zstd, compare=compiled_positions),
}


def bound_bytes(tensors: list[tuple[Words, Words]]) -> float:
    """Entropy of which words change and by how much, given the tensor and the old word's exponent, in bytes.

    It takes changes to be independent within a tensor and exponent; where they are not (rows of an embedding whose
    tokens are frequent, say), an encoder may go below it.
    """
    bits = 0.0
    for old, new in tensors:
        exponents = (old >> np.uint16(7)).astype(np.uint8)
        positions = changed_positions(old, new)
        words = np.bincount(exponents, minlength=256)
        changes = np.bincount(exponents[positions], minlength=256)
        bits += float(_placing_bits(words, changes).sum())
        bits += _values_bits(exponents[positions], new[positions] - old[positions])
    return bits / 8


def _placing_bits(words: Counts, changes: Counts) -> NDArray[np.float64]:
    same = words - changes
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -(changes * np.log2(changes / words)) - same * np.log2(same / words)
    return np.nan_to_num(bits)


def _values_bits(exponents: NDArray[np.uint8], differences: Words) -> float:
    keys, counts = np.unique(exponents.astype(np.int64) << 16 | differences, return_counts=True)
    totals = np.bincount(keys >> 16, counts, minlength=256)[keys >> 16]
    return float(-(counts * np.log2(counts / totals)).sum())
