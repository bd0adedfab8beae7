"""Cutting weights into frames of 8 MiB: big tensors are split, small ones of one dtype share a frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from rl_core.delta.manifest import FRAME_BYTES, TensorRange
from rl_core.delta.words import Words

_Flat = TypeVar("_Flat", Words, torch.Tensor)


def plan_frames(
    tensors: Iterable[tuple[int, str, int, int]], *, frame_bytes: int = FRAME_BYTES
) -> list[list[TensorRange]]:
    """Cut tensors, given as `(table index, group, elements, bytes per element)`, into frames, in order within a group.

    Tensors of one group (one dtype, one kind of change) are laid end to end and cut every `frame_bytes`.
    """
    frames: list[list[TensorRange]] = []
    filling: dict[str, tuple[list[TensorRange], int]] = {}
    for index, group, elements, itemsize in tensors:
        start = 0
        while start < elements:
            ranges, room = filling.pop(group, ([], max(1, frame_bytes // itemsize)))
            count = min(room, elements - start)
            ranges.append(TensorRange(index, start, count))
            start += count
            if room > count:
                filling[group] = (ranges, room - count)
            else:
                frames.append(ranges)
    frames.extend(ranges for ranges, _ in filling.values())
    return frames


def pieces_of(ranges: Sequence[TensorRange], words: Sequence[_Flat]) -> list[_Flat]:
    """Views of a frame's words, one per range. `words` holds the whole tensors, by table index."""
    return [words[piece.tensor][piece.start : piece.start + piece.count] for piece in ranges]
