"""Mode `tiny_gap_ulp`: gaps and differences, and words so small that nearly each step changes them apart.

Weights near zero move with every step of an optimiser, by far more than one ULP, and where they are many they take most
of the bytes. The receiver finds these words itself, by their magnitude; so of those in a row only a flag is said. All
other changes are written as in mode `gap_ulp`, among them those that take a word over the threshold: backwards, they
are taken back first, and then the tiny words are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta import detection, kernels
from rl_core.delta.magnitudes import BINS, count_changed_bins, placing_bits
from rl_core.delta.masks import AT_ONCE
from rl_core.delta.patches import Changes, Patch, Pieces, sparse_patches
from rl_core.delta.streams import StreamReader, pack_differences, pack_stream, read_differences, varint
from rl_core.delta.words import Bytes, Words
from rl_core.errors import DigestMismatch

_SPARSE_GAP: Final = 600  # mean gap from which two planes beat bytes with escapes
_SAVED: Final = 0.45  # of the bits that places cost, from which tiny words pay for looking at all words to find them
_SAMPLES: Final = (64, 32768)  # words from one to the next of a sample
_ENOUGH: Final = 24  # changes of a sample from which it tells


@dataclass(frozen=True, slots=True)
class Extracted:
    """What detection finds: all that a payload is written from.

    `changes` are listed. Of words below bin `threshold`, `flags` says which changed and stayed there, and `small` how.
    """

    changes: Changes
    threshold: int
    flags: NDArray[np.bool_]
    small: Words

    @property
    def count(self) -> int:
        """Changed words."""
        return self.changes.count + self.small.size


def low_of(threshold: int, dtype: np.dtype[Any]) -> int:
    """The least magnitude that is not tiny."""
    return threshold << (8 * dtype.itemsize - 9) if dtype.itemsize > 1 else threshold


def extract(old: Pieces, new: Pieces, *, threshold: int = 0) -> Extracted:
    """Compare pieces of equal sizes and one dtype."""
    size, dtype = sum(piece.size for piece in old) + 1, old[0].dtype
    positions, differences = np.empty(size, np.int32), np.empty(size, dtype)
    small, flags = np.empty(size, dtype), np.empty(size, np.uint8)
    base, found, low = 0, (0, 0, 0), dtype.type(low_of(threshold, dtype))
    for before, after in zip(old, new, strict=True):
        found = detection.find(before, after, base, low, found, positions, differences, small, flags)
        base += before.size
    listed, stepped, tiny = found
    changes = Changes(positions[:listed].copy(), differences[:listed].copy())
    return Extracted(changes, threshold, flags[:tiny].astype(np.bool_), small[:stepped].copy())


def choose_threshold(old: Pieces, new: Pieces) -> int:
    """The bin below which a word is tiny, by a sample; 0 where that would not pay."""
    words, changed = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    of = max(_SAMPLES[0], min(_SAMPLES[1], sum(piece.size for piece in old) >> 7))
    for before, after in zip(old, new, strict=True):
        count_changed_bins(before, after, of, words, changed)
    if changed.sum() < _ENOUGH:
        return 0
    ends = np.flatnonzero(changed)  # a tiny class ends best with a bin in which something changed
    below, moved = np.cumsum(words)[ends].astype(float), np.cumsum(changed)[ends].astype(float)
    total = float(words.sum())
    cost = placing_bits(below, moved) + placing_bits(total - below, moved[-1] - moved)
    plain = placing_bits(np.array([total]), moved[-1:])[0]
    best = int(cost.argmin())
    return int(ends[best]) + 1 if cost[best] < (1 - _SAVED) * plain else 0


def pack_extracted(found: Extracted, words: int) -> bytes:
    """The payload, for a frame of so many words."""
    changes, listed = found.changes, found.changes.count
    width = 2 if words > _SPARSE_GAP * listed else 1
    symbols = kernels.gap_symbols(changes.positions, (1 << (8 * width)) - 1)
    planes = [pack_stream((symbols >> shift).astype(np.uint8)) for shift in range(0, 8 * width, 8)] if listed else []
    parts = [*map(varint, (width, listed, found.threshold)), *planes, pack_differences(changes.differences)]
    if found.threshold:
        flags = np.packbits(found.flags, bitorder="little")
        parts += [varint(found.flags.size), varint(found.small.size), pack_stream(flags)]
        parts.append(pack_differences(found.small))
    return b"".join(parts)


def decode_tiny_gap_ulp(payload: bytes | memoryview, pieces: Pieces, *, backward: bool) -> list[Patch]:
    """`pieces` are the old words, or with `backward` the new ones. Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    reader = StreamReader(payload, limit_bytes=max(count * dtype.itemsize, count + 1))
    width, listed, threshold = reader.number(), reader.number(), reader.number()
    if width not in (1, 2) or listed > count or low_of(threshold, dtype) > 1 << (8 * dtype.itemsize - 1):
        raise DigestMismatch("a frame's header is malformed; fetch it again")
    positions = np.empty(listed, np.int32)
    if listed and not kernels.positions_of(_symbols(reader, width), (1 << (8 * width)) - 1, count, positions):
        raise DigestMismatch("a frame's gaps do not add up to its changes; fetch it again")
    patches = sparse_patches(positions, read_differences(reader, dtype=dtype, count=listed), pieces)
    if not threshold:
        reader.finish()
        return patches
    tiny, small = reader.number(), reader.number()
    flags = reader.stream()
    if small > tiny or tiny > count or flags.size != (tiny + 7) // 8:
        raise DigestMismatch("a frame's flags do not add up; fetch it again")
    differences = read_differences(reader, dtype=dtype, count=small)
    reader.finish()
    if backward:
        for patch, words in zip(patches, pieces, strict=True):
            patch.revert(words)
    try:
        flagged = _flagged(pieces, low_of(threshold, dtype), flags, tiny, differences)
    finally:
        if backward:
            for patch, words in zip(patches, pieces, strict=True):
                patch.apply(words)
    return [one.with_(two) for one, two in zip(patches, flagged, strict=True)]


def _symbols(reader: StreamReader, width: int) -> NDArray[np.uint16]:
    symbols = reader.stream().astype(np.uint16)
    if width == 2:
        high = reader.stream()
        if high.size != symbols.size:
            raise DigestMismatch("the planes of a frame's gaps differ in length; fetch it again")
        symbols |= high.astype(np.uint16) << 8
    return symbols


def _flagged(pieces: Pieces, low: int, flags: Bytes, tiny: int, differences: Words) -> list[Patch]:
    positions, seen, count = np.empty(differences.size + AT_ONCE, np.int32), 0, 0
    lowest = differences.dtype.type(low)
    patches = []
    for words in pieces:
        start = count
        seen, count = detection.find_tiny(words, lowest, flags, seen, positions, count)
        if seen < 0:
            raise DigestMismatch("a frame has other tiny words than its base; fetch it again")
        patches.append(Patch(positions[start:count], differences[start:count]))
    if seen != tiny or count != differences.size:
        raise DigestMismatch("a frame has other tiny words than its base; fetch it again")
    return patches
