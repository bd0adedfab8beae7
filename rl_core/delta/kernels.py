"""Compiled loops of the codecs: finding what changed, and turning gaps and differences into symbols. Integers only."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.words import Ints, Longs, Words

_U64: Final = np.uint64


@compiled
def _gap_symbols(positions: Ints, escape: int, symbols: NDArray[np.uint16]) -> int:
    count = 0
    following = 0
    for position in positions:
        rest = position - following
        while rest >= escape:
            symbols[count] = escape
            count += 1
            rest -= escape
        symbols[count] = rest
        count += 1
        following = position + 1
    return count


def gap_symbols(positions: Ints, escape: int) -> NDArray[np.uint16]:
    """The gaps before ascending positions in base `escape`: it as often as the gap holds it, then the rest."""
    if not positions.size:
        return np.empty(0, np.uint16)
    symbols = np.empty(positions.size + int(positions[-1]) // escape, np.uint16)
    return symbols[: _gap_symbols(positions, escape, symbols)]


@compiled
def unescape(symbols: Words, escape: int, gaps: Longs) -> int:
    """The opposite, into `gaps`. Returns how many; -1 for more than there is room for, or an end inside a gap."""
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
def _split(
    differences: Words, full: Any, pairs: NDArray[np.uint8], escapes: NDArray[np.uint8], words: Words
) -> tuple[int, int]:
    """`full` is the largest word. Returns how many escapes and how many whole words there are."""
    small = 0
    large = 0
    for i in range(differences.size):
        step = _U64(differences[i])
        up = step <= full >> _U64(1)
        code = (step << _U64(1)) - _U64(1) if up else (full - step) << _U64(1)
        pairs[i >> 1] |= min(code, _U64(15)) << _U64(4 * (i & 1))
        if code >= _U64(15):
            rest = code - _U64(15)
            escapes[small] = min(rest, _U64(255))
            small += 1
            if rest >= _U64(255):
                words[large] = code
                large += 1
    return small, large


def split_differences(differences: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Words]:
    """Steps −1, +1, −2, … become codes 0, 1, 2, …: two a byte up to 14, then bytes, then words."""
    pairs = np.zeros((differences.size + 1) // 2, np.uint8)
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
            if code == _U64(270):
                if large == words.size:
                    return False
                code = _U64(words[large])
                large += 1
        half = code >> _U64(1)
        differences[i] = half + _U64(1) if code & _U64(1) else full - half
    return small == escapes.size and large == words.size


def join_differences(pairs: NDArray[np.uint8], escapes: NDArray[np.uint8], words: Words, differences: Words) -> bool:
    """The opposite, into `differences`. False unless the escapes are exactly those that the codes ask for."""
    return _join(pairs, escapes, words, _full(differences), differences)


def _full(words: Words) -> np.uint64:
    return _U64((1 << (8 * words.itemsize)) - 1)
