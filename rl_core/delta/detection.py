"""Finding what changed, in compiled loops at the speed of memory. Integers only."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rl_core.delta.compiled import compiled
from rl_core.delta.masks import AT_ONCE, any_differs, differing, lowest, ones, smaller
from rl_core.delta.words import Bytes, Ints, Longs, Words

_U64: Final = np.uint64

STRETCH: Final = AT_ONCE * AT_ONCE  # words that are compared before any is visited

Found = tuple[int, int, int]


@compiled
def _magnitude(word: Any, itemsize: int) -> Any:
    return _U64(word) & ((_U64(1) << _U64(8 * itemsize - 1)) - _U64(1))


@compiled
def _list(
    old: Words, new: Words, at: int, changed: Any, base: int, listed: int, positions: Ints, differences: Words
) -> int:
    while changed:
        place = at + lowest(changed)
        positions[listed], differences[listed] = base + place, new[place] - old[place]
        listed += 1
        changed &= changed - _U64(1)
    return listed


@compiled
def _place(bits: Any, at: int, places: Longs, count: int) -> int:
    """Append where the set bits are. Two are written, and counted if they are set: cheaper than branching."""
    places[count] = at + lowest(bits)
    rest = bits & (bits - _U64(1))
    places[count + 1] = at + lowest(rest)
    count += min(ones(bits), 2)
    rest &= rest - _U64(1)
    while rest:
        places[count] = at + lowest(rest)
        count += 1
        rest &= rest - _U64(1)
    return count


@compiled
def _step(old: Words, new: Words, places: Longs, low: Any, tiny: int, stepped: int, small: Words, flags: Bytes) -> int:
    """Flag the tiny words at `places` from number `tiny` on, and write down how those step that stay tiny."""
    for i in range(places.size):
        was, now = old[places[i]], new[places[i]]
        flag: Any = np.int64((was != now) & (_magnitude(now, old.itemsize) < _U64(low)))
        flags[tiny + i] = flag
        small[stepped] = now - was
        stepped += flag
    return stepped


@compiled
def find_changed(
    old: Words, new: Words, at: int, base: int, listed: int, positions: Ints, differences: Words
) -> tuple[int, int]:
    """Compare two arrays of one size, whose first word is number `base` of a frame, from word `at` on.

    Changes are written from `listed` on, as positions in the frame and differences modulo the word. Returns where
    comparing ended, which is before the end when fewer than `STRETCH` more changes fit, and where the list ends now.
    Which blocks of a stretch differ is noted without a branch before they are visited: a processor that guesses wrong
    at each of them reads no further meanwhile.
    """
    blocks = old.size // AT_ONCE
    for first in range(at // AT_ONCE, blocks, AT_ONCE):
        if positions.size - listed < STRETCH:
            return first * AT_ONCE, listed
        differ = _U64(0)
        for inside in range(min(AT_ONCE, blocks - first)):
            differ |= _U64(any_differs(old, new, (first + inside) * AT_ONCE)) << _U64(inside)
        while differ:
            block = (first + lowest(differ)) * AT_ONCE
            listed = _list(old, new, block, differing(old, new, block), base, listed, positions, differences)
            differ &= differ - _U64(1)
    rest = blocks * AT_ONCE
    if positions.size - listed < old.size - rest:
        return rest, listed
    changed = _U64(0)
    for place in range(rest, old.size):
        changed |= _U64(old[place] != new[place]) << _U64(place - rest)
    return old.size, _list(old, new, rest, changed, base, listed, positions, differences)


@compiled
def find(
    old: Words,
    new: Words,
    at: int,
    base: int,
    low: Any,
    found: Found,
    positions: Ints,
    differences: Words,
    small: Words,
    flags: Bytes,
) -> tuple[int, Found]:
    """`find_changed` where words whose magnitude is below `low` before and after, tiny ones, are told apart.

    Changes of others are listed in `positions` and `differences`. Of tiny words, and of those that were so only before,
    `flags` tells whether they are tiny still and changed; `small`, which is as long, has these differences. All four
    are written on from where `found` says that they end. Returns where comparing ended, which is before the end when
    fewer than `STRETCH` more of either kind fit, and where they end now.
    """
    listed, stepped, tiny = found
    places = np.empty(STRETCH, np.int64)
    blocks = old.size // AT_ONCE
    for first in range(at // AT_ONCE, blocks, AT_ONCE):
        if positions.size - listed < STRETCH or flags.size - tiny < STRETCH:
            return first * AT_ONCE, (listed, stepped, tiny)
        count = 0
        for place in range(first * AT_ONCE, min(first + AT_ONCE, blocks) * AT_ONCE, AT_ONCE):
            changed, were = differing(old, new, place), smaller(old, place, low)
            count = _place(were, place, places, count)
            changed &= ~(were & smaller(new, place, low))
            if changed:
                listed = _list(old, new, place, changed, base, listed, positions, differences)
        stepped = _step(old, new, places[:count], low, tiny, stepped, small, flags)
        tiny += count
    rest = blocks * AT_ONCE
    if positions.size - listed < old.size - rest or flags.size - tiny < old.size - rest:
        return rest, (listed, stepped, tiny)
    count = 0
    for place in range(rest, old.size):
        if _magnitude(old[place], old.itemsize) < _U64(low):
            places[count] = place
            count += 1
            if _magnitude(new[place], old.itemsize) < _U64(low):
                continue
        if old[place] != new[place]:
            listed = _list(old, new, place, _U64(1), base, listed, positions, differences)
    stepped = _step(old, new, places[:count], low, tiny, stepped, small, flags)
    return old.size, (listed, stepped, tiny + count)


@compiled
def _flagged(at: int, tiny_bits: Any, flags: Bytes, tiny: int, positions: Ints, count: int) -> tuple[int, int]:
    if tiny + ones(tiny_bits) > 8 * flags.size or count > positions.size - AT_ONCE:
        return -1, count
    while tiny_bits:
        positions[count] = at + lowest(tiny_bits)
        flag: Any = np.int64((flags[tiny >> 3] >> np.uint8(tiny & 7)) & np.uint8(1))
        count += flag
        tiny += 1
        tiny_bits &= tiny_bits - _U64(1)
    return tiny, count


@compiled
def find_tiny(words: Words, low: Any, flags: Bytes, tiny: int, positions: Ints, count: int) -> tuple[int, int]:
    """Which of the words whose magnitude is below `low` are flagged, by one bit of `flags` each from bit `tiny` on.

    Positions are written from `count` on; `positions` has room for `AT_ONCE` more than there may be. Returns both,
    moved on; −1 for more words than flags, or flags than room.
    """
    whole = words.size // AT_ONCE * AT_ONCE
    for at in range(0, whole, AT_ONCE):
        bits = smaller(words, at, low)
        if bits and tiny >= 0:
            tiny, count = _flagged(at, bits, flags, tiny, positions, count)
    for at in range(whole, words.size):
        bits = _U64(_magnitude(words[at], words.itemsize) < _U64(low))
        if bits and tiny >= 0:
            tiny, count = _flagged(at, bits, flags, tiny, positions, count)
    return tiny, count
