"""Classes of words by magnitude: compiled loops, and the choice of where classes begin.

A word's magnitude is the word without its sign bit; its bin is the magnitude's top 8 bits, which for bf16 and fp32 are
the exponent. A class is a range of bins.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.masks import AT_ONCE, differing, ones, smaller
from rl_core.delta.words import Bytes, Longs, Words

BINS: Final = 256
CLASSES: Final = 7
BLOCK: Final = AT_ONCE  # words
ALL: Final = np.uint64(2**64 - 1)
TAKEN: Final = AT_ONCE  # words of every so many are a sample
_SAMPLED: Final = 4096  # words from one to the next of a sample that tells how magnitudes are distributed
_CANDIDATES: Final = 48  # at most as many places where a class may begin
_FEW: Final = 4  # classes that cost half the time of all
_MANY_BITS: Final = 768.0  # from which more of them are worth it
_CLASS_BITS: Final = 150.0  # about what one more class costs in tables
_CROSSING_BITS: Final = 18.0  # about what a change costs that takes a word into another class
_U64: Final = np.uint64

Masks = tuple[Any, Any, Any, Any, Any, Any]
Floats = NDArray[np.float64]


@compiled
def magnitude_shift(itemsize: int) -> int:
    """How far a magnitude is shifted to be its bin."""
    return 8 * itemsize - 9 if itemsize > 1 else 0


@compiled
def magnitude_bin(word: Any, itemsize: int) -> Any:
    """The bin of one word."""
    mask = (_U64(1) << _U64(8 * itemsize - 1)) - _U64(1)
    return (_U64(word) & mask) >> _U64(magnitude_shift(itemsize))


@compiled
def count_bins(words: Words, of: int, bins: Longs) -> None:
    """Add to `bins` [256] a few of every `of` words."""
    for start in range(0, words.size, of):
        for i in range(start, min(start + TAKEN, words.size)):
            bins[magnitude_bin(words[i], words.itemsize)] += 1


@compiled
def count_changed(old: Words, new: Words, of: int) -> int:
    """How many of that sample's words changed."""
    count, whole = 0, old.size - AT_ONCE
    for start in range(0, old.size, of):
        if start <= whole:
            count += ones(differing(old, new, start))
        else:
            for i in range(start, old.size):
                count += old[i] != new[i]
    return count


@compiled
def count_changed_bins(old: Words, new: Words, of: int, words: Longs, changed: Longs) -> None:
    """Add the sample's bins to `words`, and add to `changed` [256] those of the words that changed."""
    for start in range(0, old.size, of):
        for i in range(start, min(start + TAKEN, old.size)):
            where = magnitude_bin(old[i], old.itemsize)
            words[where] += 1
            changed[where] += old[i] != new[i]


@compiled
def _placing_bits(words: float, changes: float) -> float:
    if changes <= 0.0 or words <= changes:
        return 0.0
    same = words - changes
    return -changes * math.log2(changes / words) - same * math.log2(same / words)


@compiled
def cheapest_end(words: Longs, changed: Longs, share: float) -> int:
    """The bin before which a class of words is to end, so that changes in it and those after it cost least to place.

    `words` and `changed` [256] are a sample's. 0 where that costs more than a `share` of placing all changes alike.
    """
    all_words, all_changed = words.sum(), changed.sum()
    best, least = 0, share * _placing_bits(all_words, all_changed)
    below, inside = 0, 0
    for number in range(BINS):
        below += words[number]
        inside += changed[number]
        if changed[number]:  # a class ends best with a bin in which something changed
            cost = _placing_bits(below, inside) + _placing_bits(all_words - below, all_changed - inside)
            if cost < least:
                best, least = number + 1, cost
    return best


def bins_of(words: Words) -> Bytes:
    """The bins of some words."""
    magnitudes = words & words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
    return (magnitudes >> words.dtype.type(magnitude_shift(words.itemsize))).astype(np.uint8)


def class_lows(starts: list[int], dtype: np.dtype[Any]) -> Words:
    """The least magnitude of each class but the first [6], for classes that begin in the bins `starts` [CLASSES].

    Of a class that begins after the last bin, it is one more than any magnitude.
    """
    highest = 1 << (8 * dtype.itemsize - 1)
    return np.array([min(start << magnitude_shift(dtype.itemsize), highest) for start in starts[1:]], dtype)


@compiled
def are_few(lows: Words) -> bool:
    """Whether the last three classes are empty, as `class_lows` tells: not looking for them saves half the time."""
    return bool(_U64(lows[3]) >> _U64(8 * lows.itemsize - 1))


@compiled
def classes_below(words: Words, at: int, lows: Words, few: bool) -> Masks:
    """Of 64 words from `at` on: which are in the first class, in the first two, … in all but the last.

    With `few` the last three are not looked at: those are all words.
    """
    low1, low2, low3 = smaller(words, at, lows[0]), smaller(words, at, lows[1]), smaller(words, at, lows[2])
    if few:
        return low1, low2, low3, ALL, ALL, ALL
    return low1, low2, low3, smaller(words, at, lows[3]), smaller(words, at, lows[4]), smaller(words, at, lows[5])


@compiled
def count_below(words: Words, lows: Words, below: Bytes) -> None:
    """Of each block, how many words are as `classes_below` says: [blocks, 6]. The last block may end early."""
    few, whole, rest = are_few(lows), words.size // BLOCK, last_block(words)
    for block in range(below.shape[0]):
        if block < whole:
            masks, those = classes_below(words, block * BLOCK, lows, few), ALL
        else:
            masks, those = classes_below(rest, 0, lows, few), (_U64(1) << _U64(words.size % BLOCK)) - _U64(1)
        below[block, 0], below[block, 1] = ones(masks[0] & those), ones(masks[1] & those)
        below[block, 2], below[block, 3] = ones(masks[2] & those), ones(masks[3] & those)
        below[block, 4], below[block, 5] = ones(masks[4] & those), ones(masks[5] & those)


@compiled
def add_below(below: Bytes, totals: Longs) -> None:
    """Add all blocks of `count_below` to `totals` [6]."""
    for block in range(below.shape[0]):
        for kind in range(CLASSES - 1):
            totals[kind] += below[block, kind]


@compiled
def last_block(words: Words) -> Words:
    """The words after the last whole block, and zeros to fill a block."""
    rest = np.zeros(BLOCK, words.dtype)
    rest[: words.size % BLOCK] = words[words.size // BLOCK * BLOCK :]
    return rest


def choose_starts(old: list[Words], before: Bytes, after: Bytes) -> list[int]:
    """In which bins classes begin, ascending from 0 [CLASSES]: where changes are cheapest to place.

    Classes that are not needed begin after the last bin.

    `before` and `after` are the bins of the changed words.
    """
    words = np.zeros(BINS, np.int64)
    for piece in old:
        count_bins(piece, _SAMPLED, words)
    words *= _SAMPLED // TAKEN
    changes = np.bincount(before, minlength=BINS)
    edges = np.flatnonzero(changes)
    edges = edges[:: -(-edges.size // _CANDIDATES)]
    edges[0] = 0
    ends = np.append(edges, BINS)
    total = np.append(0, np.cumsum(np.maximum(words, changes)))[ends].astype(float)
    moved = np.append(0, np.cumsum(changes))[ends].astype(float)
    cost = placing_bits(total[None, :] - total[:, None], moved[None, :] - moved[:, None]) + _CLASS_BITS
    cost[np.tri(len(ends), k=-1, dtype=bool)] = np.inf  # classes of negative size
    np.fill_diagonal(cost, 0)
    over = np.bincount(np.minimum(before, after), minlength=BINS) - np.bincount(
        np.maximum(before, after), minlength=BINS
    )
    crossing = np.append(0, np.cumsum(over))[ends] * _CROSSING_BITS
    few, many = (_cheapest_cuts(cost, crossing, classes=classes) for classes in (_FEW, CLASSES))
    _, cuts = many if few[0] - many[0] > _MANY_BITS else few
    starts = sorted({int(ends[cut]) for cut in cuts} - {BINS})
    return starts + [BINS] * (CLASSES - len(starts))


def placing_bits(words: Floats, changes: Floats) -> Floats:
    """Entropy of placing so many changes among so many words."""
    same = words - changes
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -(changes * np.log2(changes / words)) - np.where(same > 0, same * np.log2(same / words), 0)
    return np.where(changes > 0, bits, 0.0)


def _cheapest_cuts(cost: Floats, crossing: Floats, *, classes: int) -> tuple[float, list[int]]:
    """The least cost of so many consecutive intervals, of which some may be empty, and where they start."""
    best, choices = cost[0], []
    for _ in range(classes - 1):
        tried = (best + crossing)[:, None] + cost
        np.fill_diagonal(tried, best)  # an empty class costs nothing
        choices.append(tried.argmin(0))
        best = tried.min(0)
    starts, end = [], len(cost) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return float(best[-1]), [0, *reversed(starts)]
