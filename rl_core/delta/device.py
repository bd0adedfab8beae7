"""Detection on the device that holds the weights, so that only what changed leaves it.

The same integers as `gaps.extract` finds, by torch operations that CPUs and GPUs share; the payloads are equal byte for
byte. Words are compared as signed integers of their width, which torch can do everywhere; bits are bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.delta.codec import EncodedFrame, Profile, encode_found, encode_frame
from rl_core.delta.gaps import Extracted, low_of, sample_step, threshold_of
from rl_core.delta.magnitudes import TAKEN
from rl_core.delta.patches import Changes, Patch
from rl_core.delta.words import Words
from rl_core.errors import ModelError

_HOST: Final = torch.device("cpu")
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
        if threshold:
            was_tiny = (was & mask) <= largest_tiny
            stays = was_tiny & ((now & mask) <= largest_tiny)
            (tiny,) = torch.nonzero(was_tiny, as_tuple=True)
            stepped = (changed & stays)[tiny]
            moved = tiny[stepped]
            small.append(now[moved] - was[moved])
            flags.append(stepped)
            changed &= ~stays
        (listed,) = torch.nonzero(changed, as_tuple=True)
        positions.append((listed + base).to(torch.int32))
        differences.append(now[listed] - was[listed])
        base += was.numel()
    changes = Changes(_fetched(positions), _fetched(differences).view(word))
    if not threshold:
        return Extracted(changes, 0, np.empty(0, np.bool_), np.empty(0, word))
    return Extracted(changes, threshold, _fetched(flags), _fetched(small).view(word))


def encode_where_they_are(
    old: Sequence[torch.Tensor] | None,
    new: Sequence[torch.Tensor],
    *,
    profile: Profile,
    on_device: bool | None = None,
) -> EncodedFrame:
    """One frame, byte for byte as `codec.encode_frame` writes it, of pieces as `device_words` gives them.

    Pieces that all lie on one GPU (with `on_device`, on whatever device) are compared there, if it has the memory.
    With `fast`, what leaves it then is what the payload is made of; with `small` the old words do as well, whose
    magnitudes its coder counts, and new words do where a patch would be nearly as large.
    """
    devices = {piece.device for piece in (*(old or ()), *new)}
    if on_device is None:
        on_device = devices != {_HOST}
    found = None
    if old is not None and on_device and len(devices) == 1:
        with suppress(torch.OutOfMemoryError):
            threshold = _choose_threshold(old, new) if profile is Profile.FAST else 0
            found = extract_on_device(old, new, threshold=threshold)
    if old is None or found is None:
        return encode_frame(old=None if old is None else _words(old), new=_words(new), profile=profile)
    return encode_found(
        found,
        profile,
        words=sum(piece.numel() for piece in new),
        old=lambda: _words(old),
        new=lambda: _words(new),
    )


def _choose_threshold(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> int:
    """`gaps.choose_threshold`, of a sample that is cut out where the words are."""
    of = sample_step(sum(piece.numel() for piece in new))
    return threshold_of(
        _words([_sample(piece, of) for piece in old]), _words([_sample(piece, of) for piece in new]), TAKEN
    )


def _sample(words: torch.Tensor, of: int) -> torch.Tensor:
    """`TAKEN` of every `of` words."""
    starts = torch.arange(0, words.numel(), of, device=words.device)
    places = (starts[:, None] + torch.arange(TAKEN, device=words.device)).reshape(-1)
    return words[places[places < words.numel()]]


def apply_on_device(patch: Patch, words: torch.Tensor) -> None:
    """`Patch.apply` to `device_words` where they are: only the patch goes there."""
    signed = f"i{words.element_size()}"
    values = torch.from_numpy(patch.values.view(signed).copy()).to(words.device)
    if patch.positions is None:
        words.copy_(values)
    else:
        where = torch.from_numpy(patch.positions.astype(np.int64)).to(words.device)
        words[where] += values


def _words(pieces: Sequence[torch.Tensor]) -> list[Words]:
    """Pieces as codecs read them, in the host's memory."""
    return [piece.cpu().numpy().view(f"u{piece.element_size()}") for piece in pieces]


def _fetched(parts: list[torch.Tensor]) -> NDArray[Any]:
    array: NDArray[Any] = torch.cat(parts).cpu().numpy()
    return array
