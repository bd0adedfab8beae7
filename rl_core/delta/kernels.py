"""Compiled loops of the codecs: finding what changed, and turning gaps and differences into symbols. Integers only."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.words import Bytes, Ints, Longs, Words

Units = NDArray[np.uint32]
_U64: Final = np.uint64
_NIBBLE: Final = np.uint64(15)  # the largest
_WHOLE: Final = np.uint64(15 + 255)  # from which a step is written in a word
_UNIT: Final = np.uint64(2**32 - 1)


@compiled
def unescape(symbols: Words, escape: int, gaps: Longs) -> int:
    """Gaps written in base `escape`, into `gaps`.

    Returns how many; -1 for more than there is room for, or an end inside a gap.
    """
    count = 0
    gap = np.int64(0)
    for symbol in symbols:
        gap += symbol
        if symbol != escape:
            if count == gaps.size:
                return -1
            gaps[count] = gap
            count += 1
            gap = np.int64(0)
    return -1 if symbols.size and symbols[-1] == escape else count


@compiled
def unpack_bits(packed: NDArray[np.uint8], widths: NDArray[np.uint8], values: Longs) -> None:
    """Values of `widths[i]` (at most 32) bits, lowest first, end to end; `packed` must hold as many bits."""
    held = _U64(0)
    bits = 0
    at = 0
    for i in range(values.size):
        width = widths[i]
        while bits < width:
            held |= _U64(packed[at]) << _U64(bits)
            at += 1
            bits += 8
        values[i] = held & ((_U64(1) << _U64(width)) - _U64(1))
        held >>= _U64(width)
        bits -= width


@compiled
def add_at(words: Words, positions: Ints, differences: Words) -> None:
    """`words[positions] += differences`, modulo the word. Positions must lie inside."""
    for i in range(positions.size):
        words[positions[i]] += differences[i]


@compiled
def subtract_at(words: Words, positions: Ints, differences: Words) -> None:
    """`words[positions] -= differences`, modulo the word. Positions must lie inside."""
    for i in range(positions.size):
        words[positions[i]] -= differences[i]


@compiled
def take_at(words: Words, positions: Ints, taken: Words) -> None:
    """`taken = words[positions]`. Positions must lie inside."""
    for i in range(positions.size):
        taken[i] = words[positions[i]]


@compiled
def positions_of(symbols: NDArray[np.uint16], escape: int, words: int, positions: Ints) -> bool:
    """Escaped gaps to ascending positions. False unless they fill `positions` and lie below `words`."""
    count = 0
    at = np.int64(-1)
    gap = np.int64(0)
    for symbol in symbols:
        gap += symbol
        if symbol != escape:
            at += gap + 1
            if count == positions.size or at >= words:
                return False
            positions[count] = at
            count += 1
            gap = np.int64(0)
    return gap == 0 and count == positions.size


@compiled
def _numbers_of(differences: Words, full: Any, numbers: NDArray[np.uint64]) -> None:
    for i in range(differences.size):
        step = _U64(differences[i])
        up = step <= full >> _U64(1)
        numbers[i] = step << _U64(1) if up else ((full - step) << _U64(1)) | _U64(1)


def numbers_of(differences: Words) -> NDArray[np.uint64]:
    """Steps −1, +1, −2, … become numbers 1, 2, 3, …"""
    numbers = np.empty(differences.size, np.uint64)
    _numbers_of(differences, _full(differences), numbers)
    return numbers


@compiled
def _differences_of(numbers: NDArray[np.uint64], full: Any, differences: Words) -> bool:
    largest = _U64(0)
    for i in range(numbers.size):
        number = numbers[i]
        largest = max(largest, number)
        half = number >> _U64(1)
        differences[i] = full - half if number & _U64(1) else half
    return bool(largest <= full)


def differences_of(numbers: NDArray[np.uint64], differences: Words) -> bool:
    """The opposite, into `differences`. False if a number is larger than a word may be."""
    return _differences_of(numbers, _full(differences), differences)


@compiled
def _code_of(step: Any, full: Any) -> Any:
    """Steps −1, +1, −2, … are codes 0, 1, 2, …"""
    return (step << _U64(1)) - _U64(1) if step <= full >> _U64(1) else (full - step) << _U64(1)


@compiled
def _step_of(code: Any, full: Any) -> Any:
    half = code >> _U64(1)
    return half + _U64(1) if code & _U64(1) else full - half


@compiled
def _split(
    differences: Words, full: Any, pairs: NDArray[np.uint8], escapes: NDArray[np.uint8], words: Words
) -> tuple[int, int]:
    """`full` is the largest word. Returns how many escapes and how many whole words there are."""
    small = 0
    large = 0
    half = _U64(0)
    for i in range(differences.size):
        code = _code_of(_U64(differences[i]), full)
        if i & 1:
            pairs[i >> 1] = half | min(code, _NIBBLE) << _U64(4)
        half = min(code, _NIBBLE)
        escapes[small] = min(code - _NIBBLE, _U64(255))
        is_long: Any = code >= _NIBBLE  # written first and counted if it holds: cheaper than branching
        small += is_long
        if code >= _WHOLE:
            words[large] = code
            large += 1
    if differences.size & 1:
        pairs[differences.size >> 1] = half
    return small, large


def split_differences(differences: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Words]:
    """Steps −1, +1, −2, … become codes 0, 1, 2, …: two a byte up to 14, then bytes, then words."""
    pairs = np.empty((differences.size + 1) // 2, np.uint8)
    escapes, words = np.empty(differences.size, np.uint8), np.empty_like(differences)
    small, large = _split(differences, _full(differences), pairs, escapes, words)
    return pairs, escapes[:small], words[:large]


@compiled
def _join(pairs: NDArray[np.uint8], escapes: NDArray[np.uint8], words: Words, full: Any, differences: Words) -> bool:
    small = 0
    large = 0
    for i in range(differences.size):
        code = _U64((pairs[i >> 1] >> _U64(4 * (i & 1))) & _U64(15))
        if code == _U64(15):
            if small == escapes.size:
                return False
            code += _U64(escapes[small])
            small += 1
            if code == _WHOLE:
                if large == words.size:
                    return False
                code = _U64(words[large])
                large += 1
        differences[i] = _step_of(code, full)
    return small == escapes.size and large == words.size


def join_differences(pairs: NDArray[np.uint8], escapes: NDArray[np.uint8], words: Words, differences: Words) -> bool:
    """The opposite, into `differences`. False unless the escapes are exactly those that the codes ask for."""
    return _join(pairs, escapes, words, _full(differences), differences)


@compiled
def _write_changes(
    positions: Ints, differences: Words, full: Any, low_bits: int, low: Units, symbols: Bytes, far: Units, near: Bytes,
    words: Words,
) -> tuple[int, int, int]:  # fmt: skip
    held, bits, packed, following = _U64(0), 0, 0, 0
    longer, small, large = 0, 0, 0
    for i in range(positions.size):
        gap = _U64(positions[i] - following)
        following = positions[i] + 1
        held |= (gap & ((_U64(1) << _U64(low_bits)) - _U64(1))) << _U64(bits)
        bits += low_bits
        if bits >= 32:
            low[packed] = held & _UNIT
            held >>= _U64(32)
            packed += 1
            bits -= 32
        high = gap >> _U64(low_bits)
        code = _code_of(_U64(differences[i]), full)
        symbols[i] = min(high, _NIBBLE) << _U64(4) | min(code, _NIBBLE)
        if high >= _NIBBLE:
            far[longer] = high - _NIBBLE
            longer += 1
        if code >= _NIBBLE:
            near[small] = min(code - _NIBBLE, _U64(255))
            small += 1
            if code >= _WHOLE:
                words[large] = code
                large += 1
    if bits:
        low[packed] = held
    return longer, small, large


def units_for(count: int, low_bits: int) -> int:
    """How many 32-bit units hold the low bits of so many gaps."""
    return (count * low_bits + 31) // 32


def write_changes(positions: Ints, differences: Words, low_bits: int) -> tuple[Units, Bytes, Units, Bytes, Words]:
    """Ascending positions and steps of a frame, for `gaps.pack_extracted`, which tells what the five arrays are."""
    count = positions.size
    low, symbols = np.empty(units_for(count, low_bits), np.uint32), np.empty(count, np.uint8)
    far, near, words = np.empty(count, np.uint32), np.empty(count, np.uint8), np.empty_like(differences)
    longer, small, large = _write_changes(
        positions, differences, _full(differences), low_bits, low, symbols, far, near, words
    )
    return low, symbols, far[:longer], near[:small], words[:large]


@compiled
def _read_changes(
    low: Units, low_bits: int, symbols: Bytes, far: Units, near: Bytes, words: Words, full: Any, size: int,
    positions: Ints, differences: Words,
) -> bool:  # fmt: skip
    held, bits, packed, following = _U64(0), 0, 0, _U64(0)
    longer, small, large = 0, 0, 0
    for i in range(symbols.size):
        if bits < low_bits:
            held |= _U64(low[packed]) << _U64(bits)
            packed += 1
            bits += 32
        below = held & ((_U64(1) << _U64(low_bits)) - _U64(1))
        held >>= _U64(low_bits)
        bits -= low_bits
        high = _U64(symbols[i] >> np.uint8(4))
        if high == _NIBBLE:
            if longer == far.size:
                return False
            high += _U64(far[longer])
            longer += 1
        code = _U64(symbols[i] & np.uint8(15))
        if code == _NIBBLE:
            if small == near.size:
                return False
            code += _U64(near[small])
            small += 1
            if code == _WHOLE:
                if large == words.size:
                    return False
                code = _U64(words[large])
                large += 1
        position = following + (high << _U64(low_bits) | below)
        if position >= _U64(size):
            return False
        positions[i] = position
        following = position + _U64(1)
        differences[i] = _step_of(code, full)
    return longer == far.size and small == near.size and large == words.size


def read_changes(
    low: Units, low_bits: int, symbols: Bytes, far: Units, near: Bytes, words: Words, *, size: int,
    positions: Ints, differences: Words,
) -> bool:  # fmt: skip
    """The opposite, into `positions` and `differences`. `low` must hold all low bits.

    False unless escapes are exactly those that are asked for, and all positions lie in a frame of `size` words.
    """
    full = _full(differences)
    return _read_changes(low, low_bits, symbols, far, near, words, full, size, positions, differences)


def _full(words: Words) -> np.uint64:
    return _U64((1 << (8 * words.itemsize)) - 1)
