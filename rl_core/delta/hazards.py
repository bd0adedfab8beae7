"""An entropy coder for places: which words change, where the chance of a change is known of every word.

Call −log₂(1 − p) the hazard of a word that changes with chance p. From one change to the next the hazards that are
passed by add up to an exponentially distributed number, whatever the words' own chances are; so that number is coded,
with one fixed table, and each change costs just the bits of its chance. The sum passes a word's own hazard when that
word changes: its share of the table is what lies between the sums before and after it.

Hazards are integers, so that both ends add up alike: `HALVING` is the hazard of p = ½.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled, inlined
from rl_core.delta.magnitudes import BLOCK, CLASSES, Masks, are_few, classes_below, last_block
from rl_core.delta.masks import ones
from rl_core.delta.rans import LOW, Units, close, push
from rl_core.delta.words import Bytes, Ints, Longs, Words

HALVING: Final = 1 << 18
MAX_HAZARD: Final = 16 * HALVING
_BITS: Final = 28  # of the table's probabilities
_PIECE_BITS: Final = 14
_GUESS_BITS: Final = 11
_PIECES: Final = 16  # of even chance to a halving
_HALVINGS: Final = 5  # that the table spans; a longer way is an escape for each further span
_SPAN: Final = _HALVINGS * HALVING
_NEVER: Final = 1 << 62  # more hazard than words have
_U64: Final = np.uint64

Steps = tuple[Any, Any, Any, Any, Any, Any, Any]


def _table() -> tuple[NDArray[np.uint64], NDArray[np.uint64], Bytes]:
    """Where each piece begins and how steep it is; and the first piece in each of equal parts of the table."""
    survival = [2 ** (-piece / _PIECES) for piece in range(_HALVINGS * _PIECES + 1)]
    slopes = [round((a - b) * 2 ** (_BITS - _PIECE_BITS)) for a, b in itertools.pairwise(survival)]
    begins = np.cumsum([0, *(slope << _PIECE_BITS for slope in slopes)])
    guesses = np.searchsorted(begins, np.arange(1 << _GUESS_BITS) << (_BITS - _GUESS_BITS), side="right") - 1
    return begins.astype(np.uint64), np.append(slopes, 0).astype(np.uint64), guesses.astype(np.uint8)


_BEGINS, _SLOPES, _GUESSES = _table()
# 2^38 over each slope, rounded up: of a number below 2^24, times this is the quotient, exactly (slopes are below 2^10).
_INVERSES: Final = np.array([-(-(1 << 38) // max(slope, 1)) for slope in _SLOPES.tolist()], np.uint64)
_END: Final = int(_BEGINS[-1])


@compiled
def _chance_below(hazard: int) -> Any:
    """Of 2^28, the chance that a way is shorter."""
    if hazard >= _SPAN:
        return _U64(_END)
    piece = hazard >> _PIECE_BITS
    return _BEGINS[piece] + _U64(hazard & ((1 << _PIECE_BITS) - 1)) * _SLOPES[piece]


@compiled
def _steps(hazards: Longs) -> Steps:
    """By how much the hazard of each class exceeds that of the next; the last class has none."""
    h0, h1, h2, h3, h4, h5, h6 = hazards
    return h0 - h1, h1 - h2, h2 - h3, h3 - h4, h4 - h5, h5 - h6, h6


@compiled
def _passed(masks: Masks, steps: Steps, few: bool, count: int) -> Any:
    """The hazard of the first words of a block, of whose classes `masks` tell."""
    inside = (_U64(count < BLOCK) << _U64(count % BLOCK)) - _U64(1)
    total = steps[0] * ones(masks[0] & inside) + steps[1] * ones(masks[1] & inside) + steps[2] * ones(masks[2] & inside)
    if few:
        return total + (steps[3] + steps[4] + steps[5] + steps[6]) * count
    total += (
        steps[3] * ones(masks[3] & inside) + steps[4] * ones(masks[4] & inside) + steps[5] * ones(masks[5] & inside)
    )
    return total + steps[6] * count


@compiled
def measure(words: Words, lows: Words, below: Bytes, positions: Ints, hazards: Longs, way: int, before: Longs) -> int:
    """Hazard before each of ascending positions, which begins at `way`. Returns it at the end of the words.

    `below` is what `count_below` says of the words.
    """
    few, steps = are_few(lows), _steps(hazards)
    whole = words.size // BLOCK
    rest = last_block(words)
    found = 0
    for block in range(below.shape[0]):
        while found < positions.size and positions[found] < (block + 1) * BLOCK:
            if block < whole:
                masks = classes_below(words, block * BLOCK, lows, few)
            else:
                masks = classes_below(rest, 0, lows, few)
            before[found] = way + _passed(masks, steps, few, positions[found] - block * BLOCK)
            found += 1
        for kind in range(CLASSES - 1):
            way += steps[kind] * below[block, kind]
        way += steps[CLASSES - 1] * min(BLOCK, words.size - block * BLOCK)
    return way


@compiled
def encode_places(before: Longs, own: Longs, out: Units) -> int:
    """`before` each change the hazard of all words, and its `own`. Returns how many units."""
    state = _U64(LOW)
    count = 0
    for i in range(before.size - 1, -1, -1):
        way = before[i]
        if i:
            way -= before[i - 1] + own[i - 1]
        rest = way % _SPAN
        start = _chance_below(rest)
        state, count = push(state, start, _chance_below(rest + own[i]) - start, _BITS, out, count)
        for _ in range(way // _SPAN):
            state, count = push(state, _U64(_END), _U64((1 << _BITS) - _END), _BITS, out, count)
    return close(state, out, count)


@compiled
def _pull(state: Any, start: Any, frequency: Any, coded: Units, at: int) -> tuple[Any, int]:
    """Take a symbol off the state. Returns how many units are taken, too: more than there are if they end early."""
    state = frequency * (state >> _U64(_BITS)) + (state & _U64((1 << _BITS) - 1)) - start
    more: Any = np.int64(state < _U64(LOW))  # without branching, which would be guessed wrong
    shift = _U64(32 * more)
    unit = _U64(coded[min(at, coded.size - 1)]) & _U64(-more)
    return (state << shift) | unit, at + more


@compiled
def inside_piece(chance: Any, piece: Any) -> Any:
    """How far a way reaches into a piece, for a chance from where the piece begins: over its slope, rounded down."""
    return np.int64(_U64(chance) * _INVERSES[piece] >> _U64(38))


@compiled
def _read_way(state: Any, coded: Units, at: int) -> tuple[Any, int, int, Any]:
    """The state, units taken, spans that are passed by, and the way from there; the change's own share is not taken."""
    chance = state & _U64((1 << _BITS) - 1)
    spans = 0
    while chance >= _U64(_END) and at <= coded.size:
        state, at = _pull(state, _U64(_END), _U64((1 << _BITS) - _END), coded, at)
        chance = state & _U64((1 << _BITS) - 1)
        spans += 1
    if at > coded.size:
        return state, at, spans, 0
    piece = np.int64(_GUESSES[chance >> _U64(_BITS - _GUESS_BITS)])
    while chance >= _BEGINS[piece + 1]:
        piece += 1
    return state, at, spans, (piece << _PIECE_BITS) + inside_piece(chance - _BEGINS[piece], piece)


@inlined
def _place(masks: Masks, steps: Steps, few: bool, goal: int) -> tuple[int, Any]:
    """The word of a block at which the hazard passes `goal`, and the hazard of those before it. Without branching."""
    place, passed = 0, np.int64(0)
    half = BLOCK // 2
    while half:
        before: Any = _passed(masks, steps, few, place + half)
        place, passed = (place + half, before) if before <= goal else (place, passed)
        half >>= 1
    return place, passed


@compiled
def _kind(masks: Masks, place: int) -> Any:
    """The class of a word of a block."""
    bit = _U64(1) << _U64(place)
    low = ones(masks[0] & bit) + ones(masks[1] & bit) + ones(masks[2] & bit)
    return CLASSES - 1 - low - ones(masks[3] & bit) - ones(masks[4] & bit) - ones(masks[5] & bit)


@compiled
def begin_places(coded: Units, changes: int, carried: NDArray[np.uint64], progress: Longs) -> None:
    """What `find_places` goes on from in the first piece. There must be two of `coded`."""
    state, at, spans, way = (_U64(coded[0]) << _U64(32)) | _U64(coded[1]), 2, 0, np.int64(_NEVER)
    if changes:
        state, at, spans, way = _read_way(state, coded, at)
    carried[0] = state
    progress[0], progress[1], progress[2], progress[3] = at, 0, spans * _SPAN, spans * _SPAN + way
    if at > coded.size:
        progress[3] = _NEVER


@compiled
def find_places(
    words: Words,
    lows: Words,
    hazards: Longs,
    coded: Units,
    carried: NDArray[np.uint64],
    progress: Longs,
    positions: Ints,
    kinds: Bytes,
) -> None:
    """The changes that lie in these words: positions and classes, written on from where the piece before ended.

    There is room for as many as `begin_places` was told of. `carried` is the coder's state; `progress` how many units
    it has taken (more than there are: they end early), changes found, where the way to the next one begins, and the
    hazard that it passes; both from these words on.
    """
    if are_few(lows):  # the loop is compiled for each, without what this one does not need
        _find_places(words, lows, True, hazards, coded, carried, progress, positions, kinds)
    else:
        _find_places(words, lows, False, hazards, coded, carried, progress, positions, kinds)


@inlined
def _find_places(
    words: Words, lows: Words, few: bool, hazards: Longs, coded: Units, carried: NDArray[np.uint64], progress: Longs,
    positions: Ints, kinds: Bytes,
) -> None:  # fmt: skip
    state = carried[0]
    at, found, origin, goal = progress
    steps, rest = _steps(hazards), last_block(words)
    for first in range(0, words.size, BLOCK):
        if first + BLOCK <= words.size:
            masks = classes_below(words, first, lows, few)
        else:
            masks = classes_below(rest, 0, lows, few)
        total = _passed(masks, steps, few, min(BLOCK, words.size - first))
        while total > goal:
            place, passed = _place(masks, steps, few, goal)
            kind = _kind(masks, place)
            positions[found] = first + place
            kinds[found] = kind
            found += 1
            start = _chance_below(max(passed - origin, 0))
            passed += hazards[kind]
            state, at = _pull(state, start, _chance_below(passed - origin) - start, coded, at)
            origin, goal = passed, _NEVER
            if found < positions.size:
                state, at, spans, way = _read_way(state, coded, at)
                origin += spans * _SPAN
                goal = origin + way if at <= coded.size else _NEVER
        origin -= total
        goal -= total
    carried[0] = state
    progress[0], progress[1], progress[2], progress[3] = at, found, origin, goal
