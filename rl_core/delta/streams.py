"""Streams of a frame's payload: bytes under zstandard's entropy coder, end to end, each with its lengths before it.

zstandard's Huffman coder does the work: long minimum matches and a small window, since gaps are nearly geometric and
hold no repeats. A stream that does not shrink is stored as it is.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rl_core.delta import kernels
from rl_core.delta.words import Bytes, Words
from rl_core.errors import DigestMismatch

_BYTE_ESCAPE: Final = 255
_TELLS_SIZE: Final = 0x20  # from which on the first byte of a zstd frame's header tells the decoded size
_WORTH_CODING: Final = 64  # bytes: shorter streams seldom shrink
_VARINT_BYTES: Final = 5  # lengths below 2^35
LENGTHS_BYTES: Final = 2 * _VARINT_BYTES  # at most, before a stream
_FIXED: Final = struct.Struct("<BII")  # of codec frames/1: coding, stored bytes, bytes when decoded


class _Coders(threading.local):
    """A thread's own coders: none is to be shared, and to make one costs more than to code a small stream."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=12,
            window_log=18,
            write_content_size=False,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressors = {
            layout: zstandard.ZstdDecompressor(format=layout)
            for layout in (zstandard.FORMAT_ZSTD1, zstandard.FORMAT_ZSTD1_MAGICLESS)
        }


_CODERS: Final = _Coders()


def varint(value: int) -> bytes:
    """Seven bits a byte, lowest first (LEB128)."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_stream(stream: NDArray[Any]) -> bytes:
    """A stream with its lengths: twice the stored length, plus 1 and the decoded length if it is compressed."""
    return b"".join(stream_parts(stream))


def stream_parts(stream: NDArray[Any]) -> tuple[bytes, bytes | memoryview]:
    """What `pack_stream` joins: the lengths, and the bytes, which are the stream's own where it does not shrink."""
    if not stream.size:
        return varint(0), b""
    data = np.ascontiguousarray(stream).data.cast("B")
    packed = _CODERS.compressor.compress(data) if len(data) >= _WORTH_CODING else data
    if len(packed) < len(data):
        return varint(len(packed) << 1 | 1) + varint(len(data)), packed
    return varint(len(data) << 1), data


def little_endian(stream: NDArray[Any]) -> NDArray[Any]:
    """The same numbers, lowest byte first, whatever the machine."""
    return stream.astype(stream.dtype.newbyteorder("<"), copy=False)


def from_little_endian(data: Bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A stream's bytes as numbers, read-only, at an address that compiled loops may read them from."""
    numbers = data.view(dtype.newbyteorder("<"))
    numbers = (numbers if numbers.flags.aligned else numbers.copy()).astype(dtype, copy=False)
    numbers.flags.writeable = False
    return numbers


def store_stream(stream: NDArray[Any]) -> bytes:
    """A stream that no coder shrinks any more, little-endian."""
    data = little_endian(stream).tobytes()
    return varint(len(data) << 1) + data


class StreamReader:
    """Reads numbers and streams in order. Every method raises DigestMismatch for bytes that no encoder writes."""

    def __init__(self, payload: bytes | memoryview, *, limit_bytes: int) -> None:
        self._rest = memoryview(payload).toreadonly()  # or loops are compiled anew for bytes that may be written to
        self._limit_bytes = limit_bytes

    def number(self) -> int:
        """One varint."""
        value = 0
        for index in range(min(_VARINT_BYTES, len(self._rest))):
            value |= (self._rest[index] & 0x7F) << (7 * index)
            if self._rest[index] < 0x80:
                self._rest = self._rest[index + 1 :]
                return value
        raise DigestMismatch("a frame ends inside a number; fetch it again")

    def stream(self) -> Bytes:
        """One stream, decoded; never longer than the limit (a frame cannot be a bomb)."""
        head = self.number()
        stored, coded = head >> 1, head & 1
        length = self.number() if coded else stored
        body, self._rest = self._rest[:stored], self._rest[stored:]
        if len(body) != stored or length > self._limit_bytes:
            raise DigestMismatch("a stream of a frame is malformed; fetch it again")
        return np.frombuffer(_decompress(body, length=length) if coded else body, np.uint8)

    def units(self) -> NDArray[np.uint32]:
        """One stream of 32-bit units."""
        data = self.stream()
        if data.size % 4:
            raise DigestMismatch("a stream of a frame ends inside a unit; fetch it again")
        return from_little_endian(data, np.dtype(np.uint32))

    def finish(self) -> None:
        """Nothing may follow."""
        if len(self._rest):
            raise DigestMismatch("a frame goes on after its last stream; fetch it again")


class FixedStreamReader(StreamReader):
    """Streams as codec `frames/1` wrote them: coding, stored length and decoded length in nine bytes."""

    def stream(self) -> Bytes:
        """One stream, decoded."""
        if len(self._rest) < _FIXED.size:
            raise DigestMismatch("a frame ends inside a stream; fetch it again")
        coding, stored, length = _FIXED.unpack_from(self._rest)
        body, self._rest = self._rest[_FIXED.size : _FIXED.size + stored], self._rest[_FIXED.size + stored :]
        if len(body) != stored or coding > 1 or length > self._limit_bytes or (coding == 0 and stored != length):
            raise DigestMismatch("a stream of a frame is malformed; fetch it again")
        return np.frombuffer(_decompress(body, length=length, magic=True) if coding else body, np.uint8)


def _decompress(data: memoryview, *, length: int, magic: bool = False) -> bytes:
    layout = zstandard.FORMAT_ZSTD1 if magic else zstandard.FORMAT_ZSTD1_MAGICLESS
    try:
        # zstandard allocates what a header tells: let it be what the frame says, or nothing (as `pack_stream` does).
        if zstandard.frame_content_size(data) not in (-1, length) if magic else data[0] >= _TELLS_SIZE:
            raise DigestMismatch("a compressed stream is not as long as its frame says; fetch it again")
        decoder = _CODERS.decompressors[layout]
        decoded = decoder.decompress(data, max_output_size=length, allow_extra_data=False)
    except (zstandard.ZstdError, IndexError) as error:
        raise DigestMismatch(f"a compressed stream does not decode: {error}; fetch it again") from error
    if len(decoded) != length:
        raise DigestMismatch("a compressed stream is not as long as its frame says; fetch it again")
    return decoded


def read_gaps(reader: StreamReader, *, count: int) -> NDArray[np.int64]:
    """Exactly `count` gaps, of bytes in base 255. Raises: DigestMismatch."""
    symbols = reader.stream()
    gaps = np.empty(count, np.int64)
    if kernels.unescape(symbols, _BYTE_ESCAPE, gaps) != count:
        raise DigestMismatch("a frame's gaps do not add up to its changes; fetch it again")
    return gaps


def pack_differences(differences: Words) -> bytes:
    """Three streams: small codes, two a byte (so that a ±1 wastes no bit under Huffman), then two kinds of escapes."""
    pairs, escapes, words = kernels.split_differences(differences)
    return pack_stream(pairs) + pack_stream(escapes) + pack_stream(little_endian(words))


def read_differences(reader: StreamReader, *, dtype: np.dtype[Any], count: int) -> Words:
    """The opposite of `pack_differences`. Raises: DigestMismatch."""
    pairs, escapes, words = reader.stream(), reader.stream(), reader.stream()
    if pairs.size != (count + 1) // 2 or words.size % dtype.itemsize:
        raise DigestMismatch("a frame's differences do not add up to its changes; fetch it again")
    differences = np.empty(count, dtype)
    whole = from_little_endian(words, dtype)
    if not kernels.join_differences(pairs, escapes, whole, differences):
        raise DigestMismatch("a frame's escapes do not add up; fetch it again")
    return differences
