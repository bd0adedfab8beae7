"""Counting words by magnitude, in compiled loops: where in its class a word stands, and which word stands there.

A word's magnitude is the word without its sign bit; for the float formats its order is that of |w|. Blocks of words are
counted class by class with vector instructions; only the blocks that hold a wanted word are looked into.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.words import Words

CLASSES: Final = 4
_BLOCK: Final = 128  # words counted at once; a count of them fits the accumulators
_CHUNK: Final = 16384  # words that stay in the nearest cache between counting and locating
_U64: Final = np.uint64
_U16: Final = np.uint16

Longs = NDArray[np.int64]
Ints = NDArray[np.int32]


@compiled
def _count_between(words: Words, start: Any, length: int, low: Any, span: Any) -> Any:
    """Words of a stretch whose magnitude is in [low, low + span]. `length` is below 2^16."""
    word = words.dtype.type
    mask = word((_U64(1) << _U64(8 * words.itemsize - 1)) - _U64(1))
    count = _U16(0)
    for i in range(length):
        above = word(word(words[start + _U64(i)] & mask) - low)
        count = _U16(count + _U16(above <= span))
    return np.int64(count)


@compiled
def _find_nth(words: Words, start: int, skip: int, low: Any, span: Any) -> int:
    """Where the word stands that comes after `skip` others of [low, low + span]; there must be one."""
    word = words.dtype.type
    mask = word((_U64(1) << _U64(8 * words.itemsize - 1)) - _U64(1))
    at = start
    while True:
        if word(word(words[at] & mask) - low) <= span:
            if skip == 0:
                return at
            skip -= 1
        at += 1


@compiled
def _count_blocks(words: Words, start: int, stop: int, lows: Words, table: Longs) -> int:
    """Row b+1 of `table` becomes row b plus the words of each class in block b. Returns how many blocks."""
    word = words.dtype.type
    mask = word((_U64(1) << _U64(8 * words.itemsize - 1)) - _U64(1))
    t1, t2, t3 = lows[1], lows[2], lows[3]
    whole = (stop - start) // _BLOCK
    for block in range(whole):
        at = _U64(start + block * _BLOCK)
        a1 = _U16(0)
        a2 = _U16(0)
        a3 = _U16(0)
        for i in range(_BLOCK):
            magnitude = word(words[at + _U64(i)] & mask)
            a1 = _U16(a1 + _U16(magnitude >= t1))
            a2 = _U16(a2 + _U16(magnitude >= t2))
            a3 = _U16(a3 + _U16(magnitude >= t3))
        n1, n2, n3 = np.int64(a1), np.int64(a2), np.int64(a3)
        table[block + 1, 0] = table[block, 0] + _BLOCK - n1
        table[block + 1, 1] = table[block, 1] + n1 - n2
        table[block + 1, 2] = table[block, 2] + n2 - n3
        table[block + 1, 3] = table[block, 3] + n3
    if start + whole * _BLOCK == stop:
        return whole
    for kind in range(CLASSES):
        table[whole + 1, kind] = table[whole, kind]
    for i in range(start + whole * _BLOCK, stop):
        magnitude = word(words[i] & mask)
        kind = (magnitude >= t1) + (magnitude >= t2) + (magnitude >= t3)
        table[whole + 1, np.int64(kind)] += 1
    return whole + 1


@compiled
def _locate(
    words: Words,
    lows: Words,
    spans: Words,
    totals: Longs,
    ranks: Longs,
    following: Longs,
    ends: Longs,
    positions: Ints,
    table: Longs,
    at: Longs,
    skip: Longs,
    index_of: Longs,
    low_of: Words,
    span_of: Words,
) -> None:
    """The opposite: `ranks` hold each class's ascending ranks, from `following[class]` to `ends[class]`.

    Positions are written at the same places, for ranks that lie in these words; `following` and `totals` go on over
    pieces. The last four have room for `_CHUNK` words that are looked for: where, and how many to skip from there.
    """
    for start in range(0, words.size, _CHUNK):
        stop = min(start + _CHUNK, words.size)
        for kind in range(CLASSES):
            table[0, kind] = totals[kind]
        blocks = _count_blocks(words, start, stop, lows, table)
        count = 0
        for kind in range(CLASSES):
            index, block, until = following[kind], 0, table[blocks, kind]
            while index < ends[kind] and ranks[index] < until:
                while table[block + 1, kind] <= ranks[index]:
                    block += 1
                index_of[count] = index
                low_of[count] = lows[kind]
                span_of[count] = spans[kind]
                at[count] = start + block * _BLOCK
                skip[count] = ranks[index] - table[block, kind]
                if at[count] + _BLOCK <= words.size:
                    count += 1
                else:
                    positions[index] = _find_nth(words, at[count], skip[count], lows[kind], spans[kind])
                index += 1
            following[kind] = index
            totals[kind] = until
        # Halving all of them in step keeps many independent counts in flight; one after another waits for each.
        half = _BLOCK // 2
        while half:
            for i in range(count):
                inside = _count_between(words, _U64(at[i]), half, low_of[i], span_of[i])
                beyond = np.int64(inside <= skip[i])
                at[i] += half * beyond
                skip[i] -= inside * beyond
            half >>= 1
        for i in range(count):
            positions[index_of[i]] = at[i]


@dataclass
class ClassCounter:
    """Counts words by magnitude class, piece after piece. `lows` [CLASSES] are where classes begin; the first is 0."""

    lows: Words
    totals: Longs = field(default_factory=lambda: np.zeros(CLASSES, np.int64))

    def __post_init__(self) -> None:
        word = self.lows.dtype.type
        self._mask = word((1 << (8 * self.lows.itemsize - 1)) - 1)
        self._spans = np.append(self.lows[1:] - 1, self._mask).astype(word) - self.lows
        self._table = np.zeros((_CHUNK // _BLOCK + 1, CLASSES), np.int64)

    def locate(self, words: Words, ranks: Longs, following: Longs, ends: Longs, positions: Ints) -> None:
        """Write the positions of those ranks that lie in the next piece; `following` moves past them."""
        places = np.empty((3, _CHUNK), np.int64)
        classes = np.empty((2, _CHUNK), self.lows.dtype)
        counted = (words, self.lows, self._spans, self.totals)
        _locate(*counted, ranks, following, ends, positions, self._table, *places, *classes)
