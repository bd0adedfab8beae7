"""What the `fast` profile extracts, on the device that holds the weights: only what the payload is made of leaves it.

The same integers as `gaps.extract` finds, by torch operations that CPUs and GPUs share; the payloads are equal byte for
byte. Words are compared as signed integers of their width, which torch can do everywhere; bits are bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.delta.codec import EncodedFrame, FrameMode
from rl_core.delta.gaps import Extracted, low_of, pack_extracted
from rl_core.delta.patches import Changes, Patch
from rl_core.errors import ModelError

_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def device_words(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor on any device as integers of its elements' width [numel].

    Raises: ModelError when no view exists.
    """
    if not tensor.is_contiguous() or tensor.layout != torch.strided:
        raise ModelError("weights must be dense and contiguous; call .contiguous() first")
    return tensor.detach().reshape(-1).view(_SIGNED[tensor.element_size()])


def extract_on_device(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], *, threshold: int = 0) -> Extracted:
    """Compare pieces of equal sizes and one dtype, as `device_words` gives them, where they are.

    `threshold` is the bin below which a word is tiny, as in `gaps.Extracted`.
    """
    word = np.dtype(f"u{old[0].element_size()}")
    largest_tiny = low_of(threshold, word) - 1
    mask = (1 << (8 * word.itemsize - 1)) - 1
    positions, differences, small, flags = [], [], [], []
    base = 0
    for was, now in zip(old, new, strict=True):
        changed = was != now
        was_tiny = (was & mask) <= largest_tiny
        stays = was_tiny & ((now & mask) <= largest_tiny)
        (listed,) = torch.nonzero(changed & ~stays, as_tuple=True)
        (tiny,) = torch.nonzero(was_tiny, as_tuple=True)
        stepped = (changed & stays)[tiny]
        moved = tiny[stepped]
        positions.append((listed + base).to(torch.int32))
        differences.append(now[listed] - was[listed])
        small.append(now[moved] - was[moved])
        flags.append(stepped)
        base += was.numel()
    changes = Changes(_fetched(positions), _fetched(differences).view(word))
    return Extracted(changes, threshold, _fetched(flags), _fetched(small).view(word))


def encode_on_device(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], *, threshold: int = 0) -> EncodedFrame:
    """One frame of the `fast` profile, as `codec.encode_frame` writes it."""
    found = extract_on_device(old, new, threshold=threshold)
    payload = pack_extracted(found, sum(piece.numel() for piece in new))
    return EncodedFrame(FrameMode.RICE_ULP, payload, found.count)


def apply_on_device(patch: Patch, words: torch.Tensor) -> None:
    """`Patch.apply` to `device_words` where they are: only the patch goes there."""
    signed = f"i{words.element_size()}"
    values = torch.from_numpy(patch.values.view(signed).copy()).to(words.device)
    if patch.positions is None:
        words.copy_(values)
    else:
        where = torch.from_numpy(patch.positions.astype(np.int64)).to(words.device)
        words[where] += values


def _fetched(parts: list[torch.Tensor]) -> NDArray[Any]:
    array: NDArray[Any] = torch.cat(parts).cpu().numpy()
    return array
