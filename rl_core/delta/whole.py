"""Modes that hold the new words and know nothing of old ones: `raw`, and `planes` for words of several bytes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import zstandard

from rl_core.delta.patches import Patch, Pieces, whole_patches
from rl_core.delta.streams import LENGTHS_BYTES, StreamReader, stream_parts
from rl_core.delta.words import Words
from rl_core.errors import DigestMismatch
from rl_core.memory import mapped

_LEVEL: Final = 1


def encode_raw(new: Pieces) -> bytes:
    """The words' bytes under zstd."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(_joined(new).view(np.uint8).data)


def decode_raw(payload: bytes | memoryview, pieces: Pieces) -> list[Patch]:
    """Raises: DigestMismatch for anything but exactly the words of `pieces`."""
    length = sum(piece.nbytes for piece in pieces)
    try:
        if zstandard.frame_content_size(payload) != length:
            raise DigestMismatch("a compressed frame is not as long as its words; fetch it again")
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DigestMismatch(f"a compressed frame does not decode: {error}; fetch it again") from error
    return whole_patches(np.frombuffer(data, pieces[0].dtype), pieces)


def encode_planes(new: Pieces) -> memoryview:
    """Byte planes, each a stream: exponents shrink by themselves, while mantissas between them would hide it."""
    width, count = new[0].itemsize, sum(piece.size for piece in new)
    pieces = [piece.astype(_little(piece.dtype), copy=False).view(np.uint8) for piece in new]
    payload = mapped(width * (count + LENGTHS_BYTES))
    plane, end = np.empty(count, np.uint8), 0
    for index in range(width):
        np.concatenate([piece[index::width] for piece in pieces], out=plane)
        for part in stream_parts(plane):
            payload[end : end + len(part)] = part
            end += len(part)
    return payload[:end]


def decode_planes(payload: bytes | memoryview, pieces: Pieces) -> list[Patch]:
    """Raises: DigestMismatch."""
    dtype, count = pieces[0].dtype, sum(piece.size for piece in pieces)
    reader = StreamReader(payload, limit_bytes=count)
    planes = np.empty((count, dtype.itemsize), np.uint8)
    for index in range(dtype.itemsize):
        plane = reader.stream()
        if plane.size != count:
            raise DigestMismatch("a plane of a frame is not as long as its words; fetch it again")
        planes[:, index] = plane
    reader.finish()
    return whole_patches(planes.reshape(-1).view(_little(dtype)).astype(dtype, copy=False), pieces)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _joined(pieces: Pieces) -> Words:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
