"""Mode `rice_ulp`: gaps and steps, and words so small that nearly each step of training changes them apart.

A gap's low bits, which are nearly uniform, are written as they are (Rice's code); what is left of it is small, and
shares a byte with the step: one stream for the entropy coder, in which both waste no fraction of a bit.

Weights near zero move with every step of an optimiser, by far more than one ULP, and where they are many they take most
of the bytes. The receiver finds these words itself, by their magnitude; so of those in a row only a flag is said. All
other changes are written with their gaps, among them those that take a word over the threshold: backwards, they
are taken back first, and then the tiny words are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta import detection, kernels
from rl_core.delta.magnitudes import BINS, cheapest_end, count_changed, count_changed_bins
from rl_core.delta.masks import AT_ONCE
from rl_core.delta.patches import Changes, Patch, Pieces, sparse_patches
from rl_core.delta.sparse import read_positions
from rl_core.delta.streams import (
    StreamReader,
    from_little_endian,
    little_endian,
    pack_differences,
    pack_stream,
    read_differences,
    store_stream,
    varint,
)
from rl_core.delta.words import Bytes, Words
from rl_core.errors import DigestMismatch

_ROOM: Final = 1 << 16  # changes that there is room for at first
_MAX_LOW_BITS: Final = 24  # of a gap
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
    dtype = old[0].dtype
    if not threshold:
        return Extracted(_changes(old, new), 0, np.empty(0, np.bool_), np.empty(0, dtype))
    positions, flags = np.empty(_ROOM, np.int32), np.empty(_ROOM, np.uint8)
    differences, small = np.empty(_ROOM, dtype), np.empty(_ROOM, dtype)
    base, found, low = 0, (0, 0, 0), dtype.type(low_of(threshold, dtype))
    for before, after in zip(old, new, strict=True):
        at = 0
        while at < before.size:
            listed, stepped, tiny = found
            if positions.size - listed < detection.STRETCH:
                positions, differences = _longer(positions, listed), _longer(differences, listed)
            if flags.size - tiny < detection.STRETCH:
                small, flags = _longer(small, stepped), _longer(flags, tiny)
            at, found = detection.find(before, after, at, base, low, found, positions, differences, small, flags)
        base += before.size
    listed, stepped, tiny = found
    changes = Changes(positions[:listed].copy(), differences[:listed].copy())
    return Extracted(changes, threshold, flags[:tiny].astype(np.bool_), small[:stepped].copy())


def _changes(old: Pieces, new: Pieces) -> Changes:
    positions, differences = np.empty(_ROOM, np.int32), np.empty(_ROOM, old[0].dtype)
    base, listed = 0, 0
    for before, after in zip(old, new, strict=True):
        at = 0
        while at < before.size:
            at, listed = detection.find_changed(before, after, at, base, listed, positions, differences)
            if at < before.size:
                positions, differences = _longer(positions, listed), _longer(differences, listed)
        base += before.size
    return Changes(positions[:listed], differences[:listed])


def _longer(array: NDArray[Any], used: int) -> NDArray[Any]:
    """The same with room for twice as much."""
    longer = np.empty(2 * array.size, array.dtype)
    longer[:used] = array[:used]
    return longer


def choose_threshold(old: Pieces, new: Pieces) -> int:
    """The bin below which a word is tiny, by a sample; 0 where that would not pay."""
    return threshold_of(old, new, sample_step(sum(piece.size for piece in old)))


def sample_step(words: int) -> int:
    """From one to the next `TAKEN` words of a frame's sample: so many of a frame of so many words."""
    return max(_SAMPLES[0], min(_SAMPLES[1], words >> 7))


def threshold_of(old: Pieces, new: Pieces, of: int) -> int:
    """`choose_threshold` by the sample that is `TAKEN` of every `of` words of each piece."""
    if sum(count_changed(before, after, of) for before, after in zip(old, new, strict=True)) < _ENOUGH:
        return 0
    words, changed = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for before, after in zip(old, new, strict=True):
        count_changed_bins(before, after, of, words, changed)
    return cheapest_end(words, changed, 1 - _SAVED)


def pack_extracted(found: Extracted, words: int) -> bytes:
    """The payload, for a frame of so many words.

    After the header: low bits of gaps, end to end; a byte a change, the rest of its gap and its step in four bits each,
    15 for what is longer; the rests of such gaps; of such steps in bytes, and in words where that is too short, too.
    """
    changes, listed = found.changes, found.changes.count
    parts = [*map(varint, (listed, found.threshold))]
    if listed:
        low_bits = min(max((words // listed).bit_length() - 2, 0), _MAX_LOW_BITS)  # a gap's rest is 2 to 4 on average
        low, symbols, far, near, whole = kernels.write_changes(changes.positions, changes.differences, low_bits)
        parts += [varint(low_bits), store_stream(low), pack_stream(symbols)]
        parts += [pack_stream(little_endian(far)), pack_stream(near), pack_stream(little_endian(whole))]
    if found.threshold:
        flags = np.packbits(found.flags, bitorder="little")
        parts += [varint(found.flags.size), varint(found.small.size), pack_stream(flags)]
        parts.append(pack_differences(found.small))
    return b"".join(parts)


def decode_rice_ulp(payload: bytes | memoryview, pieces: Pieces, *, backward: bool) -> list[Patch]:
    """`pieces` are the old words, or with `backward` the new ones. Raises: DigestMismatch."""
    reader = _reader(payload, pieces)
    listed, threshold = reader.number(), reader.number()
    _check_head(listed, threshold, pieces)
    changes = _read_changes(reader, listed, pieces)
    return _with_tiny(
        reader, sparse_patches(changes.positions, changes.differences, pieces), threshold, pieces, backward=backward
    )


def _read_changes(reader: StreamReader, listed: int, pieces: Pieces) -> Changes:
    dtype = pieces[0].dtype
    positions, differences = np.empty(listed, np.int32), np.empty(listed, dtype)
    if not listed:
        return Changes(positions, differences)
    low_bits, low, symbols = reader.number(), reader.units(), reader.stream()
    far, near, whole = reader.units(), reader.stream(), reader.stream()
    fits = low_bits <= _MAX_LOW_BITS and low.size == kernels.units_for(listed, low_bits) and symbols.size == listed
    if not fits or whole.size % dtype.itemsize:
        raise DigestMismatch("a frame's streams do not add up to its changes; fetch it again")
    words = from_little_endian(whole, dtype)
    count = sum(piece.size for piece in pieces)
    if not kernels.read_changes(
        low, low_bits, symbols, far, near, words, size=count, positions=positions, differences=differences
    ):
        raise DigestMismatch("a frame's gaps or steps do not add up; fetch it again")
    return Changes(positions, differences)


def decode_tiny_gap_ulp(payload: bytes | memoryview, pieces: Pieces, *, backward: bool) -> list[Patch]:
    """`pieces` are the old words, or with `backward` the new ones. Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    reader = _reader(payload, pieces)
    width, listed, threshold = reader.number(), reader.number(), reader.number()
    if width not in (1, 2):
        raise DigestMismatch("a frame's header is malformed; fetch it again")
    _check_head(listed, threshold, pieces)
    none = np.empty(0, np.int32)
    positions = read_positions(reader, width=width, changes=listed, words=count) if listed else none
    patches = sparse_patches(positions, read_differences(reader, dtype=dtype, count=listed), pieces)
    return _with_tiny(reader, patches, threshold, pieces, backward=backward)


def _reader(payload: bytes | memoryview, pieces: Pieces) -> StreamReader:
    count = sum(piece.size for piece in pieces)
    return StreamReader(payload, limit_bytes=max(count * pieces[0].itemsize, count + 1))


def _check_head(listed: int, threshold: int, pieces: Pieces) -> None:
    dtype = pieces[0].dtype
    if listed > sum(piece.size for piece in pieces) or low_of(threshold, dtype) > 1 << (8 * dtype.itemsize - 1):
        raise DigestMismatch("a frame's header is malformed; fetch it again")


def _with_tiny(
    reader: StreamReader, patches: list[Patch], threshold: int, pieces: Pieces, *, backward: bool
) -> list[Patch]:
    """The patches with those of tiny words, which are the rest of the payload."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
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
