"""Mode `class_gap_ulp`, as codec `frames/2` wrote it: `gap_ulp` with what the receiver knows of the old weights.

The chance that a weight changes halves with every binade of its magnitude, and the receiver holds the old weight. So
words are sorted into a few classes by magnitude, gaps are counted among the words of a class, and each class's gaps
are written in their own scale: the low bits, which are nearly uniform, as they are, and the rest as bytes that look
alike in all classes and share one Huffman table. Classes in which most words change share another, and so do their
differences.

A change that takes a word into another class is listed apart, by its plain position. Everywhere else old and new words
are of the same class, so that a patch can be read from either side: backwards, those changes are taken back first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rl_core.delta import kernels
from rl_core.delta.counting import CLASSES, ClassCounter, Longs
from rl_core.delta.patches import Patch, Pieces, sparse_patches
from rl_core.delta.streams import (
    StreamReader,
    read_differences,
    read_gaps,
)
from rl_core.delta.words import Words
from rl_core.errors import DigestMismatch

_BINS: Final = 256  # of magnitudes by their top 8 bits: the exponent, for bf16 and fp32
_MAX_LOW_BITS: Final = 30


def _shift(itemsize: int) -> int:
    return 8 * itemsize - 1 - 8 if itemsize > 1 else 0


def _lows(starts: list[int], dtype: np.dtype[Any]) -> Words:
    """The least magnitude of each class; a class that begins past the last bin has nothing but the largest word."""
    top = (1 << (8 * dtype.itemsize - 1)) - 1
    return np.array([min(start << _shift(dtype.itemsize), top) for start in starts], dtype)


@dataclass(frozen=True, slots=True)
class _Class:
    """Of a class: how many words change, and how many low bits of its gaps are split off (None: a dense class)."""

    changes: int
    low_bits: int | None


def decode_class_gap_ulp(payload: bytes | memoryview, pieces: Pieces, *, backward: bool) -> list[Patch]:
    """`pieces` are the old words, or with `backward` the new ones. Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    reader = StreamReader(payload, limit_bytes=max(count * dtype.itemsize, count + 1))
    apart = reader.number()
    numbers = [reader.number() for _ in range(3 * CLASSES)]
    starts = numbers[:CLASSES]
    rows = [
        _Class(n, bits - 1 if bits else None)
        for n, bits in zip(numbers[CLASSES:-CLASSES], numbers[-CLASSES:], strict=True)
    ]
    _check_head(apart, starts, rows, count=count)
    positions = np.cumsum(read_gaps(reader, count=apart) + 1) - 1
    if apart and positions[-1] >= count:
        raise DigestMismatch("a frame changes words beyond its end; fetch it again")
    crossing = sparse_patches(positions.astype(np.int32), read_differences(reader, dtype=dtype, count=apart), pieces)
    gaps, differences = _read_classes(reader, rows, dtype=dtype, limit=count)
    reader.finish()
    if backward:
        for patch, words in zip(crossing, pieces, strict=True):
            patch.revert(words)
    try:
        staying = _located(ClassCounter(_lows(starts, dtype)), gaps, [row.changes for row in rows], differences, pieces)
    finally:
        if backward:
            for patch, words in zip(crossing, pieces, strict=True):
                patch.apply(words)
    return [one.with_(two) for one, two in zip(staying, crossing, strict=True)]


def _check_head(apart: int, starts: list[int], rows: list[_Class], *, count: int) -> None:
    ascending = starts[0] == 0 and starts == sorted(starts) and starts[-1] <= _BINS
    bits = max(row.low_bits or 0 for row in rows)
    if not ascending or apart + sum(row.changes for row in rows) > count or bits > _MAX_LOW_BITS:
        raise DigestMismatch("a frame's header is malformed; fetch it again")


def _read_classes(reader: StreamReader, rows: list[_Class], *, dtype: np.dtype[Any], limit: int) -> tuple[Longs, Words]:
    counts = [row.changes for row in rows]
    dense = np.repeat([row.low_bits is None for row in rows], counts)
    widths = np.repeat(np.array([row.low_bits or 0 for row in rows], np.uint8), counts)
    packed = reader.stream()
    if packed.size != (int(widths.sum(dtype=np.int64)) + 7) // 8:
        raise DigestMismatch("a frame's low bits do not add up to its changes; fetch it again")
    gaps, differences = np.empty(dense.size, np.int64), np.empty(dense.size, dtype)
    low = np.empty(dense.size, np.int64)
    kernels.unpack_bits(packed, widths, low)
    for part in (dense, ~dense):
        size = int(np.count_nonzero(part))
        gaps[part] = read_gaps(reader, count=size)
        differences[part] = read_differences(reader, dtype=dtype, count=size)
    gaps = (gaps << widths) | low
    if gaps.size and not 0 <= gaps.min() <= gaps.max() < limit:
        raise DigestMismatch("a frame has a gap that is longer than itself; fetch it again")
    return gaps, differences


def _located(counter: ClassCounter, gaps: Longs, counts: list[int], differences: Words, pieces: Pieces) -> list[Patch]:
    """The changes of each piece that stay in their class."""
    ends = np.cumsum(np.array(counts, np.int64))
    following = ends - np.array(counts, np.int64)
    ranks = np.cumsum(gaps + 1)
    ranks -= np.repeat(np.append(0, ranks)[following] + 1, counts)
    positions = np.empty(gaps.size, np.int32)
    found = []
    for words in pieces:
        before = following.copy()
        counter.locate(words, ranks, following, ends, positions)
        slices = [slice(low, high) for low, high in zip(before, following, strict=True)]
        found.append(
            Patch(np.concatenate([positions[s] for s in slices]), np.concatenate([differences[s] for s in slices]))
        )
    if (following != ends).any():
        raise DigestMismatch("a frame counts more words than there are; fetch it again")
    return found
