"""Mode `gap_ulp`, as codecs `frames/1` and `frames/2` wrote it: gaps between changed words, and their differences.

Gaps are bytes with an escape where changes are dense, and 16-bit in two planes where they are sparse. Differences of
the words, modulo their width, are zig-zag coded: one step up or down is one ULP, by far the commonest change. Two
differences share a byte, so that Huffman codes pairs and does not waste the fraction of a bit that a ±1 is worth.

Because differences are modular integers, every pair of words is representable, −0, NaN payloads and infinities
included, and a patch can be taken back: old = new − difference.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from rl_core.delta import kernels
from rl_core.delta.patches import Patch, Pieces, sparse_patches
from rl_core.delta.streams import StreamReader, read_differences
from rl_core.delta.words import Ints
from rl_core.errors import DigestMismatch

_HEADER: Final = struct.Struct("<BI")  # bytes per gap symbol, changed words


def decode_gap_ulp(payload: bytes | memoryview, pieces: Pieces, reader_type: type[StreamReader]) -> list[Patch]:
    """Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    view = memoryview(payload)
    if len(view) < _HEADER.size:
        raise DigestMismatch("a frame is too short for its header; fetch it again")
    width, changes = _HEADER.unpack_from(view)
    if width not in (1, 2) or changes > count:
        raise DigestMismatch("a frame's header is malformed; fetch it again")
    # The gaps' symbols are at most one per word plus escapes: bounded by the words they skip.
    reader = reader_type(view[_HEADER.size :], limit_bytes=max(count * dtype.itemsize, count + 1))
    if changes == 0:
        reader.finish()
        return [Patch(np.empty(0, np.int32), np.empty(0, dtype)) for _ in pieces]
    positions = read_positions(reader, width=width, changes=changes, words=count)
    differences = read_differences(reader, dtype=dtype, count=changes)
    reader.finish()
    return sparse_patches(positions, differences, pieces)


def read_positions(reader: StreamReader, *, width: int, changes: int, words: int) -> Ints:
    """Ascending positions in a frame of so many words, from gaps of `width` bytes. Raises: DigestMismatch."""
    symbols = reader.stream().astype(np.uint16)
    if width == 2:
        high = reader.stream()
        if high.size != symbols.size:
            raise DigestMismatch("the planes of a frame's gaps differ in length; fetch it again")
        symbols |= high.astype(np.uint16) << 8
    positions = np.empty(changes, np.int32)
    if not kernels.positions_of(symbols, (1 << (8 * width)) - 1, words, positions):
        raise DigestMismatch("a frame's gaps do not add up to its changes; fetch it again")
    return positions
