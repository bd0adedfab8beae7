"""Mode `hazard`: what the receiver knows of the old weights as the context of everything.

The chance that a weight changes halves with every binade of its magnitude, and the receiver holds the old weight. So
words are sorted into up to seven classes by magnitude, each with its own chance to change (`hazards`) and its own
table of differences (`rans`).

A change that takes a word into another class is listed apart, by its plain position. Everywhere else old and new words
are of the same class, so that a patch can be read from either side: backwards, those changes are taken back first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rl_core.delta import kernels
from rl_core.delta.hazards import HALVING, MAX_HAZARD, begin_places, encode_places, find_places, measure
from rl_core.delta.magnitudes import (
    BINS,
    BLOCK,
    CLASSES,
    add_below,
    bins_of,
    choose_starts,
    class_lows,
    count_below,
)
from rl_core.delta.patches import Changes, Patch, Pieces, sparse_patches
from rl_core.delta.rans import Units, pack_numbers, read_numbers
from rl_core.delta.streams import StreamReader, store_stream, varint
from rl_core.delta.words import Bytes, Ints, Longs, Words
from rl_core.errors import DigestMismatch

_APART: Final = 2  # contexts of what is listed apart: gaps and differences


@dataclass(frozen=True, slots=True)
class _Classes:
    """Where classes begin, in bins, and the hazard of a word of each [CLASSES]."""

    starts: list[int]
    hazards: list[int]

    def kind_of(self) -> Bytes:
        """The class of each bin."""
        kinds = np.searchsorted(np.array(self.starts), np.arange(BINS), side="right") - 1
        return kinds.astype(np.uint8)


def encode_hazard(changes: Changes, old: Pieces) -> bytes:
    """A patch of `old`, of at least one change."""
    words = _changed(changes, old)
    before, after = bins_of(words), bins_of(words + changes.differences)
    starts = choose_starts(list(old), before, after)
    kind_of = _Classes(starts, []).kind_of()
    stays = kind_of[before] == kind_of[after]
    staying, apart = changes.where(stays), changes.where(~stays)
    kinds = kind_of[before[stays]]
    lows = class_lows(starts, old[0].dtype)
    below = [_below(words, lows) for words in old]
    classes = _Classes(starts, _hazards(below, sum(words.size for words in old), kinds))
    hazards = np.array(classes.hazards, np.int64)
    own = hazards[kinds]
    coded = np.empty(2 * own.size + 64, np.uint32)
    size = encode_places(_ways(old, below, lows, hazards, staying), own, coded)
    return b"".join(
        (
            *map(varint, (apart.count, staying.count, *starts[1:], *classes.hazards)),
            _pack_apart(apart),
            store_stream(coded[:size]),
            pack_numbers(kernels.numbers_of(staying.differences), kinds, kinds=CLASSES, bits=8 * old[0].itemsize),
        )
    )


def _changed(changes: Changes, old: Pieces) -> Words:
    """The old words that changed."""
    words = np.empty_like(changes.differences)
    for piece, positions, inside in changes.by_piece(old):
        kernels.take_at(piece, positions, words[inside])
    return words


def _below(words: Words, lows: Words) -> Bytes:
    below = np.empty((-(-words.size // BLOCK), CLASSES - 1), np.uint8)
    count_below(words, lows, below)
    return below


def _hazards(below: list[Bytes], words: int, kinds: Bytes) -> list[int]:
    """Of each class, from how many of its words change."""
    ends = np.zeros(CLASSES - 1, np.int64)
    for table in below:
        add_below(table, ends)
    sizes = np.diff(ends, prepend=0, append=words)
    counts = np.bincount(kinds, minlength=CLASSES)
    return [
        min(MAX_HAZARD, max(1, round(-math.log2(1 - count / (size + 1)) * HALVING))) if count else 0
        for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
    ]


def _ways(old: Pieces, below: list[Bytes], lows: Words, hazards: Longs, staying: Changes) -> Longs:
    """Hazard of all words before each change."""
    ways, way = np.empty(staying.count, np.int64), 0
    for table, (words, positions, inside) in zip(below, staying.by_piece(old), strict=True):
        way = measure(words, lows, table, positions, hazards, way, ways[inside])
    return ways


def _pack_apart(apart: Changes) -> bytes:
    if not apart.count:
        return b""
    gaps = np.diff(apart.positions, prepend=-1).astype(np.uint64)
    contexts = np.repeat(np.arange(_APART, dtype=np.uint8), apart.count)
    return pack_numbers(
        np.append(gaps, kernels.numbers_of(apart.differences)),
        contexts,
        kinds=_APART,
        bits=_apart_bits(apart.differences.dtype),
    )


def _apart_bits(dtype: np.dtype[Any]) -> int:
    """Of gaps, which are positions, and of differences."""
    return max(32, 8 * dtype.itemsize)


def decode_hazard(payload: bytes | memoryview, pieces: Pieces, *, backward: bool) -> list[Patch]:
    """`pieces` are the old words, or with `backward` the new ones. Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    # A number may take 12 bits and as many as it has; tables are small.
    reader = StreamReader(payload, limit_bytes=4096 + count * (dtype.itemsize + 2))
    apart, staying = reader.number(), reader.number()
    starts = [0, *(reader.number() for _ in range(CLASSES - 1))]
    classes = _Classes(starts, [reader.number() for _ in range(CLASSES)])
    _check_head(apart + staying, classes, count=count)
    crossing = _read_apart(reader, pieces, apart, count=count)
    coded = reader.units()
    if backward:
        for patch, words in zip(crossing, pieces, strict=True):
            patch.revert(words)
    try:
        positions, kinds, cuts = _find(pieces, classes, coded, staying)
    finally:
        if backward:
            for patch, words in zip(crossing, pieces, strict=True):
                patch.apply(words)
    differences = _differences(read_numbers(reader, kinds, kinds=CLASSES, bits=8 * dtype.itemsize), dtype)
    reader.finish()
    return [
        Patch(positions[low:high], differences[low:high]).with_(patch)
        for low, high, patch in zip([0, *cuts], cuts, crossing, strict=False)
    ]


def _check_head(changes: int, classes: _Classes, *, count: int) -> None:
    starts = classes.starts
    ascending = starts == sorted(starts) and starts[1] >= 1 and starts[-1] <= BINS
    if changes > count or not ascending or max(classes.hazards) > MAX_HAZARD:
        raise DigestMismatch("a frame's header is malformed; fetch it again")


def _read_apart(reader: StreamReader, pieces: Pieces, apart: int, *, count: int) -> list[Patch]:
    if not apart:
        return sparse_patches(np.empty(0, np.int32), np.empty(0, pieces[0].dtype), pieces)
    contexts = np.repeat(np.arange(_APART, dtype=np.uint8), apart)
    numbers = read_numbers(reader, contexts, kinds=_APART, bits=_apart_bits(pieces[0].dtype))
    gaps = numbers[:apart]
    if gaps.max() > count or gaps.sum() > count:
        raise DigestMismatch("a frame changes words beyond its end; fetch it again")
    positions = np.cumsum(gaps.astype(np.int64)) - 1
    return sparse_patches(positions.astype(np.int32), _differences(numbers[apart:], pieces[0].dtype), pieces)


def _find(pieces: Pieces, classes: _Classes, coded: Units, staying: int) -> tuple[Ints, Bytes, list[int]]:
    """Positions in their pieces, classes, and how many come before the end of each piece."""
    if coded.size < 2:
        raise DigestMismatch("a frame has no places; fetch it again")
    hazards, lows = np.array(classes.hazards, np.int64), class_lows(classes.starts, pieces[0].dtype)
    carried, progress = np.empty(1, np.uint64), np.empty(4, np.int64)
    positions, kinds = np.empty(staying, np.int32), np.empty(staying, np.uint8)
    begin_places(coded, staying, carried, progress)
    cuts = []
    for words in pieces:
        find_places(words, lows, hazards, coded, carried, progress, positions, kinds)
        cuts.append(int(progress[1]))
    if progress[1] != staying or progress[0] != coded.size or carried[0] != 1 << 32:
        raise DigestMismatch("a frame's places do not add up to its words; fetch it again")
    return positions, kinds, cuts


def _differences(numbers: Any, dtype: np.dtype[Any]) -> Words:
    differences = np.empty(numbers.size, dtype)
    if not kernels.differences_of(numbers, differences):
        raise DigestMismatch("a difference of a frame is wider than its words; fetch it again")
    return differences
