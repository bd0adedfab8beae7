"""Frame codecs behind one interface: `raw` (the new bytes) and `gap_ulp` (where words changed, and by how much).

`gap_ulp` keeps two streams. Gaps between changed words are bytes with an escape where changes are dense, and 16-bit
in two planes where they are sparse. Differences of the words, modulo their width, are zig-zag coded: one step up or
down is the difference of one ULP, by far the commonest change. Two differences share a byte, so that Huffman codes
pairs and does not waste the fraction of a bit that a ±1 is worth; rarer ones escape to a byte, then to a whole word.
zstandard entropy-codes every stream with long minimum matches, since gaps are nearly geometric and hold no repeats.

Because differences are modular integers, every pair of words is representable, −0, NaN payloads and infinities
included, and a patch can be taken back: old = new − difference.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from rl_core.delta.words import Words
from rl_core.errors import DigestMismatch

CODEC_VERSION: Final = "frames/1"

Pieces = Sequence[Words]

_SECTION: Final = struct.Struct("<BII")  # coding, stored bytes, bytes when decoded
_HEADER: Final = struct.Struct("<BI")  # bytes per gap symbol, changed words
_RAW_LEVEL: Final = 1
_NIBBLE_ESCAPE: Final = 15
_BYTE_ESCAPE: Final = 255
_SPARSE_GAP: Final = 600  # mean gap from which two planes beat bytes with escapes
_BLOCK_WORDS: Final = 1 << 18
_TRY_RAW: Final = 8  # a patch smaller than an eighth of its words is never beaten by raw in practice


class FrameMode(StrEnum):
    """How a frame's payload is written."""

    RAW = "raw"  # the new words, compressed; says nothing of the old ones
    GAP_ULP = "gap_ulp"  # gaps between changed words and their differences; applies backwards too


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded frame. Sparse: `positions` and `values` (differences), [n] each. Whole: no positions, all words."""

    positions: NDArray[np.int64] | None
    values: Words

    def apply(self, words: Words) -> None:
        """Old words become new words, in place."""
        if self.positions is None:
            words[:] = self.values
        else:
            words[self.positions] += self.values

    def revert(self, words: Words) -> None:
        """New words become old words, in place. Sparse patches only."""
        if self.positions is None:
            raise TypeError("a whole frame does not hold the old words; take a snapshot instead")
        words[self.positions] -= self.values


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame's payload with its mode, and how many words it changes (all of them, for a raw frame without a base)."""

    mode: FrameMode
    payload: bytes
    changes: int


class FrameCodec(Protocol):
    """One mode. `reversible` says whether its patches can be taken back."""

    reversible: bool

    def encode(self, *, old: Pieces | None, new: Pieces) -> bytes | None:
        """The payload that turns `old` into `new`, pieces laid end to end; None where this mode cannot say it."""

    def decode(self, payload: bytes | memoryview, *, dtype: np.dtype[Any], count: int) -> Patch:
        """The patch over `count` words. Raises: DigestMismatch for bytes that this mode never writes."""


def _entropy_coder() -> zstandard.ZstdCompressor:
    # Made per call: a compressor is not to be shared between threads, and making one costs microseconds.
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=12, window_log=18, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _pack(stream: NDArray[Any]) -> bytes:
    data = stream.tobytes()
    packed = _entropy_coder().compress(data)
    if len(packed) < len(data):
        return _SECTION.pack(1, len(packed), len(data)) + packed
    return _SECTION.pack(0, len(data), len(data)) + data


def _decompress(data: memoryview, *, length: int) -> bytes:
    """Decompress to exactly `length` bytes, never more (a frame cannot be a bomb)."""
    try:
        if zstandard.frame_content_size(data) != length:
            raise DigestMismatch("a compressed stream is not as long as its frame says; fetch it again")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DigestMismatch(f"a compressed stream does not decode: {error}; fetch it again") from error


class _Sections:
    """Reads the sections of a payload in order."""

    def __init__(self, payload: memoryview, *, limit_bytes: int) -> None:
        self._rest = payload
        self._limit_bytes = limit_bytes

    def take(self) -> NDArray[np.uint8]:
        if len(self._rest) < _SECTION.size:
            raise DigestMismatch("a frame ends inside a stream; fetch it again")
        coding, stored, length = _SECTION.unpack_from(self._rest)
        body, self._rest = self._rest[_SECTION.size : _SECTION.size + stored], self._rest[_SECTION.size + stored :]
        if len(body) != stored or coding > 1 or length > self._limit_bytes or (coding == 0 and stored != length):
            raise DigestMismatch("a stream of a frame is malformed; fetch it again")
        return np.frombuffer(_decompress(body, length=length) if coding else body, np.uint8)

    def finish(self) -> None:
        if len(self._rest):
            raise DigestMismatch("a frame goes on after its last stream; fetch it again")


class RawCodec:
    """The new words, zstd'd. Needs no base and knows none."""

    reversible = False

    def encode(self, *, old: Pieces | None, new: Pieces) -> bytes | None:
        """Compress the new words; `old` is not looked at."""
        del old
        words = new[0] if len(new) == 1 else np.concatenate(new)
        return zstandard.ZstdCompressor(level=_RAW_LEVEL).compress(words.view(np.uint8).data)

    def decode(self, payload: bytes | memoryview, *, dtype: np.dtype[Any], count: int) -> Patch:
        """All `count` words. Raises: DigestMismatch."""
        data = _decompress(memoryview(payload), length=count * dtype.itemsize)
        return Patch(None, np.frombuffer(data, dtype))


def _encode_gaps(gaps: NDArray[np.int64], *, width: int) -> list[bytes]:
    """Gaps in base `escape`: as many escape symbols as the gap holds whole bases, then the rest."""
    escape = (1 << (8 * width)) - 1
    whole = gaps // escape
    ends = np.cumsum(whole + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, escape, np.uint16)
    symbols[ends] = gaps - whole * escape
    if width == 1:
        return [_pack(symbols.astype(np.uint8))]
    return [_pack((symbols & 0xFF).astype(np.uint8)), _pack((symbols >> 8).astype(np.uint8))]


def _decode_positions(sections: _Sections, *, width: int, changes: int, count: int) -> NDArray[np.int64]:
    escape = (1 << (8 * width)) - 1
    symbols: NDArray[Any] = sections.take()
    if width == 2:
        high = sections.take()
        if high.size != symbols.size:
            raise DigestMismatch("the planes of a frame's gaps differ in length; fetch it again")
        symbols = symbols | (high.astype(np.uint16) << 8)
    ends = np.flatnonzero(symbols != escape)
    if ends.size != changes or (changes and ends[-1] != symbols.size - 1):
        raise DigestMismatch("a frame's gaps do not add up to its changes; fetch it again")
    positions = np.cumsum(symbols, dtype=np.int64)
    if ends.size != symbols.size:
        positions = positions[ends]
    positions += np.arange(changes, dtype=np.int64)
    if changes and positions[-1] >= count:
        raise DigestMismatch("a frame changes words beyond its end; fetch it again")
    return positions


def _zigzag(differences: Words) -> Words:
    """Modular differences, never 0, to 0, 1, 2, … for −1, +1, −2, … in the same width."""
    bits = differences.dtype.itemsize * 8
    signs = differences >> (bits - 1)  # 1 for negative
    codes: Words = (differences << 1) ^ np.negative(signs)
    codes -= codes.dtype.type(1)
    return codes


def _unzigzag(codes: Words) -> Words:
    codes = codes + codes.dtype.type(1)
    differences: Words = (codes >> 1) ^ np.negative(codes & codes.dtype.type(1))
    return differences


def _encode_differences(differences: Words) -> list[bytes]:
    codes = _zigzag(differences)
    nibbles = np.zeros(codes.size + codes.size % 2, np.uint8)
    np.minimum(codes, _NIBBLE_ESCAPE, out=nibbles[: codes.size], casting="unsafe")
    large = codes[codes >= _NIBBLE_ESCAPE] - codes.dtype.type(_NIBBLE_ESCAPE)
    words = codes[codes >= _NIBBLE_ESCAPE][large >= _BYTE_ESCAPE]
    return [
        _pack(nibbles[0::2] | (nibbles[1::2] << 4)),
        _pack(np.minimum(large, _BYTE_ESCAPE).astype(np.uint8)),
        _pack(words.astype(words.dtype.newbyteorder("<"))),
    ]


def _decode_differences(sections: _Sections, *, dtype: np.dtype[Any], changes: int) -> Words:
    pairs, escapes, words = sections.take(), sections.take(), sections.take()
    if pairs.size != (changes + 1) // 2 or words.size % dtype.itemsize:
        raise DigestMismatch("a frame's differences do not add up to its changes; fetch it again")
    codes = np.empty(pairs.size * 2, dtype)
    codes[0::2] = pairs & 0xF
    codes[1::2] = pairs >> 4
    codes = codes[:changes]
    large = escapes.astype(dtype)
    beyond = np.flatnonzero(escapes == _BYTE_ESCAPE)
    at = np.flatnonzero(codes == _NIBBLE_ESCAPE)
    if at.size != escapes.size or beyond.size != words.size // dtype.itemsize:
        raise DigestMismatch("a frame's escapes do not add up; fetch it again")
    large += dtype.type(_NIBBLE_ESCAPE)
    large[beyond] = words.view(dtype.newbyteorder("<"))
    codes[at] = large
    return _unzigzag(codes)


def _changes(old: Pieces, new: Pieces) -> tuple[NDArray[np.int64], Words]:
    """Where the words differ, and by how much. Blocks keep the mask in cache: half as slow again without."""
    mask = np.empty(_BLOCK_WORDS, np.bool_)
    positions: list[NDArray[np.int64]] = []
    differences: list[Words] = []
    offset = 0
    for before, after in zip(old, new, strict=True):
        for start in range(0, after.size, _BLOCK_WORDS):
            was, now = before[start : start + _BLOCK_WORDS], after[start : start + _BLOCK_WORDS]
            found = np.flatnonzero(np.not_equal(was, now, out=mask[: now.size]))
            differences.append(now[found] - was[found])
            positions.append(found + (offset + start))
        offset += after.size
    return np.concatenate(positions), np.concatenate(differences)


class GapUlpCodec:
    """Gaps and ULP differences of the words that changed."""

    reversible = True

    def encode(self, *, old: Pieces | None, new: Pieces) -> bytes | None:
        """The patch from `old` to `new`; None without a base of the same pieces."""
        if old is None or [(a.size, a.dtype) for a in old] != [(a.size, a.dtype) for a in new]:
            return None
        positions, differences = _changes(old, new)
        if positions.size == 0:
            return _HEADER.pack(1, 0)
        gaps = np.diff(positions, prepend=-1) - 1
        width = 2 if sum(piece.size for piece in new) > _SPARSE_GAP * positions.size else 1
        sections = _encode_gaps(gaps, width=width) + _encode_differences(differences)
        return b"".join([_HEADER.pack(width, positions.size), *sections])

    def decode(self, payload: bytes | memoryview, *, dtype: np.dtype[Any], count: int) -> Patch:
        """A sparse patch over `count` words. Raises: DigestMismatch."""
        view = memoryview(payload)
        if len(view) < _HEADER.size:
            raise DigestMismatch("a frame is too short for its header; fetch it again")
        width, changes = _HEADER.unpack_from(view)
        if width not in (1, 2) or changes > count:
            raise DigestMismatch("a frame's header is malformed; fetch it again")
        # The gaps' symbols are at most one per word plus escapes: bounded by the words they skip.
        sections = _Sections(view[_HEADER.size :], limit_bytes=max(count * dtype.itemsize, count + 1))
        if changes == 0:
            sections.finish()
            return Patch(np.empty(0, np.int64), np.empty(0, dtype))
        positions = _decode_positions(sections, width=width, changes=changes, count=count)
        differences = _decode_differences(sections, dtype=dtype, changes=changes)
        sections.finish()
        return Patch(positions, differences)


CODECS: Final[dict[FrameMode, FrameCodec]] = {FrameMode.RAW: RawCodec(), FrameMode.GAP_ULP: GapUlpCodec()}


def encode_frame(*, old: Pieces | None, new: Pieces) -> EncodedFrame:
    """Encode one frame in the smallest mode. `old` None means that the receiver has nothing to patch."""
    elements, size = sum(piece.size for piece in new), sum(piece.nbytes for piece in new)
    patch = CODECS[FrameMode.GAP_ULP].encode(old=old, new=new)
    if patch is None:
        raw = CODECS[FrameMode.RAW].encode(old=None, new=new)
        return EncodedFrame(FrameMode.RAW, raw or b"", elements)
    changes = int(_HEADER.unpack_from(patch)[1])
    if len(patch) * _TRY_RAW > size:
        raw = CODECS[FrameMode.RAW].encode(old=old, new=new)
        if raw is not None and len(raw) < len(patch):
            return EncodedFrame(FrameMode.RAW, raw, changes)
    return EncodedFrame(FrameMode.GAP_ULP, patch, changes)


def decode_frame(mode: FrameMode, payload: bytes | memoryview, *, dtype: np.dtype[Any], count: int) -> Patch:
    """Decode one frame of `count` words. Raises: DigestMismatch."""
    return CODECS[mode].decode(payload, dtype=dtype, count=count)
