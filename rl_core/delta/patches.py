"""Patches: what a decoded frame does to the words of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.delta import kernels
from rl_core.delta.words import Ints, Words

Pieces = Sequence[Words]


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs in a frame: ascending positions over its pieces end to end, and differences modulo the word."""

    positions: Ints
    differences: Words

    @property
    def count(self) -> int:
        """Changed words."""
        return self.positions.size

    def where(self, mask: NDArray[np.bool_]) -> Changes:
        """Some of them."""
        return Changes(self.positions[mask], self.differences[mask])

    def by_piece(self, pieces: Pieces) -> Iterator[tuple[Words, Ints, slice[Any, Any, Any]]]:
        """Each piece, the positions in it of the changes there, and which changes these are."""
        ends = [*accumulate(piece.size for piece in pieces)]
        cuts = self.positions.searchsorted(np.array(ends, np.int32)).tolist()
        for words, end, low, high in zip(pieces, ends, [0, *cuts], cuts, strict=False):
            yield words, self.positions[low:high] - np.int32(end - words.size), slice(low, high)


@dataclass(frozen=True, slots=True)
class Patch:
    """For one piece of a frame. Sparse: `positions` and `values` (differences), [n] each. Whole: values alone."""

    positions: Ints | None
    values: Words

    def apply(self, words: Words) -> None:
        """Old words become new words, in place."""
        if self.positions is None:
            words[:] = self.values
        else:
            kernels.add_at(words, self.positions, self.values)

    def revert(self, words: Words) -> None:
        """New words become old words, in place. Sparse patches only."""
        if self.positions is None:
            raise TypeError("a whole frame does not hold the old words; take a snapshot instead")
        kernels.subtract_at(words, self.positions, self.values)

    def with_(self, other: Patch) -> Patch:
        """Both of two sparse patches that change different words."""
        if other.values.size == 0:
            return self
        if self.positions is None or other.positions is None:
            raise TypeError("a whole frame goes with no other")
        positions = np.concatenate([self.positions, other.positions])
        return Patch(positions, np.concatenate([self.values, other.values]))


def whole_patches(words: Words, pieces: Pieces) -> list[Patch]:
    """All the words of a frame, cut like its pieces."""
    ends = np.cumsum([piece.size for piece in pieces])
    return [Patch(None, words[end - piece.size : end]) for piece, end in zip(pieces, ends, strict=True)]


def sparse_patches(positions: Ints, values: Words, pieces: Pieces) -> list[Patch]:
    """Ascending positions over a whole frame, cut like its pieces and counted from each one's start."""
    return [Patch(inside, values[at]) for _, inside, at in Changes(positions, values).by_piece(pieces)]
