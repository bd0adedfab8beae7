"""An entropy coder for numbers in contexts: range asymmetric numeral systems (Duda 2013) with static tables.

A number is coded as its bucket (its highest three bits and how many follow) under a table of its context, and the bits
that follow as they are. Tables are written as logarithms, since they are much of a small frame.

zstandard's Huffman codes waste the fractions of bits that near-certain symbols are worth and know no contexts; and
places (`hazards`) need a coder whose next symbol depends on the words that the last one led to.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_core.delta.compiled import compiled
from rl_core.delta.streams import StreamReader, pack_stream, store_stream
from rl_core.delta.words import Bytes, Longs
from rl_core.errors import DigestMismatch

LOW: Final = 1 << 32  # a state is at least this; below it, 32 bits are taken in
_BITS: Final = 12  # of the probabilities in tables
_TOTAL: Final = 1 << _BITS
_STEPS: Final = 4  # to which a table's logarithms are rounded: a fourth of a halving
_U64: Final = np.uint64
_U32: Final = np.uint32

Units = NDArray[np.uint32]
Numbers = NDArray[np.uint64]


@compiled
def push(state: Any, start: Any, frequency: Any, bits: int, out: Units, count: int) -> tuple[Any, int]:
    """Code a symbol that has [start, start + frequency) of 2^bits. Returns the state and how many units are out."""
    if frequency >> _U64(bits):
        return state, count  # certain
    if state >= frequency << _U64(64 - bits):
        out[count] = _U32(state & _U64(0xFFFFFFFF))
        count += 1
        state >>= _U64(32)
    return ((state // frequency) << _U64(bits)) + state % frequency + start, count


@compiled
def close(state: Any, out: Units, count: int) -> int:
    """Write the state, and turn all that was written around: it is read from its end."""
    out[count] = _U32(state & _U64(0xFFFFFFFF))
    out[count + 1] = _U32(state >> _U64(32))
    count += 2
    for i in range(count // 2):
        out[i], out[count - 1 - i] = out[count - 1 - i], out[i]
    return count


@compiled
def _bucket(number: Any) -> tuple[Any, Any]:
    """Of a number of at least 1: its symbol, and how many bits follow."""
    if number < _U64(4):
        return number - _U64(1), _U64(0)
    length = _U64(2)
    rest = number >> _U64(3)
    while rest:
        length += _U64(1)
        rest >>= _U64(1)
    return (length << _U64(2)) + ((number >> (length - _U64(2))) & _U64(3)) - _U64(5), length - _U64(2)


@compiled
def _split(numbers: Numbers, contexts: Bytes, symbols: Bytes, counts: Longs, extra: Units) -> int:
    """Symbols and their counts [contexts, symbols], and the bits that follow, end to end. Returns how many units."""
    held = _U64(0)
    bits = _U64(0)
    count = 0
    for i in range(numbers.size):
        number = numbers[i]
        symbol, width = _bucket(number)
        symbols[i] = symbol
        counts[contexts[i], symbol] += 1
        while width:
            take = min(width, _U64(32))
            held |= (number & ((_U64(1) << take) - _U64(1))) << bits
            bits += take
            number >>= take
            width -= take
            if bits >= _U64(32):
                extra[count] = _U32(held & _U64(0xFFFFFFFF))
                count += 1
                held >>= _U64(32)
                bits -= _U64(32)
    if bits:
        extra[count] = _U32(held)
        count += 1
    return count


@compiled
def _encode(symbols: Bytes, contexts: Bytes, starts: Units, out: Units) -> int:
    """`starts` [contexts, symbols + 1] are cumulated frequencies."""
    state = _U64(LOW)
    count = 0
    for i in range(symbols.size - 1, -1, -1):
        start = _U64(starts[contexts[i], symbols[i]])
        frequency = _U64(starts[contexts[i], np.int64(symbols[i]) + 1]) - start
        state, count = push(state, start, frequency, _BITS, out, count)
    return close(state, out, count)


@compiled
def _decode(coded: Units, extra: Units, contexts: Bytes, starts: Units, lookup: Bytes, numbers: Numbers) -> bool:
    """`lookup` [contexts, 2^bits] is the symbol of each part of a table. False unless all that was coded is used up."""
    if coded.size < 2:
        return False
    state = (_U64(coded[0]) << _U64(32)) | _U64(coded[1])
    at = 2
    held = _U64(0)
    bits = _U64(0)
    taken = 0
    for i in range(numbers.size):
        context = contexts[i]
        part = state & _U64(_TOTAL - 1)
        symbol = np.int64(lookup[context, part])
        start = _U64(starts[context, symbol])
        state = (_U64(starts[context, symbol + 1]) - start) * (state >> _U64(_BITS)) + part - start
        if state < _U64(LOW):
            if at == coded.size:
                return False
            state = (state << _U64(32)) | _U64(coded[at])
            at += 1
        if symbol < 3:
            numbers[i] = symbol + 1
            continue
        length = _U64(symbol + 5) >> _U64(2)
        width = length - _U64(2)
        number = (_U64(4) | (_U64(symbol + 5) & _U64(3))) << width
        shift = _U64(0)
        while width:
            take = min(width, _U64(32))
            if bits < take:
                if taken == extra.size:
                    return False
                held |= _U64(extra[taken]) << bits
                taken += 1
                bits += _U64(32)
            number |= (held & ((_U64(1) << take) - _U64(1))) << shift
            held >>= take
            bits -= take
            shift += take
            width -= take
        numbers[i] = number
    return state == _U64(LOW) and at == coded.size and taken == extra.size and held == _U64(0)


@compiled
def _logarithms(counts: Longs) -> Bytes:
    """Tables as they are written: 0 for a symbol that does not occur, else 1 + its logarithm in steps."""
    table = np.zeros(counts.shape, np.uint8)
    for context in range(counts.shape[0]):
        total = counts[context].sum()
        for symbol in range(counts.shape[1]):
            if counts[context, symbol]:
                step = round(_STEPS * (_BITS + math.log2(counts[context, symbol] / total)))
                table[context, symbol] = 1 + max(step, 0)
    return table


_WEIGHTS: Final = np.array([0, *(round(2 ** (step / _STEPS)) for step in range(_STEPS * _BITS + 1))])


@compiled
def _starts(logarithms: Bytes) -> Units:
    """Cumulated frequencies [contexts, symbols + 1] that add up to the total; a context without symbols has none."""
    contexts, symbols = logarithms.shape
    starts = np.zeros((contexts, symbols + 1), np.uint32)
    frequencies = np.empty(symbols, np.int64)
    for context in range(contexts):
        weights = _WEIGHTS[logarithms[context]]
        total = weights.sum()
        if total == 0:
            continue
        for symbol in range(symbols):
            weight = weights[symbol]
            frequencies[symbol] = max(weight * (_TOTAL - symbols) // total, 1) if weight else 0
        frequencies[frequencies.argmax()] += _TOTAL - frequencies.sum()
        for symbol in range(symbols):
            starts[context, symbol + 1] = starts[context, symbol] + frequencies[symbol]
    return starts


@compiled
def _has_tables(contexts: Bytes, whole: NDArray[np.bool_]) -> bool:
    """Whether each context that occurs, all below the number of tables, has one."""
    missing = 0
    for context in contexts:
        missing |= not whole[context]
    return missing == 0


@compiled
def _lookup(starts: Units) -> Bytes:
    """The symbol of each part of a table [contexts, 2^bits]."""
    lookup = np.zeros((starts.shape[0], _TOTAL), np.uint8)
    for context in range(starts.shape[0]):
        for symbol in range(starts.shape[1] - 1):
            lookup[context, starts[context, symbol] : starts[context, symbol + 1]] = symbol
    return lookup


def _symbols(bits: int) -> int:
    """Buckets of numbers of so many bits."""
    return 4 * bits - 4


def pack_numbers(numbers: Numbers, contexts: Bytes, *, kinds: int, bits: int) -> bytes:
    """Numbers of at least 1 and at most `bits` bits, each in one of `kinds` contexts."""
    symbols, counts = np.empty(numbers.size, np.uint8), np.zeros((kinds, _symbols(bits)), np.int64)
    extra, coded = np.empty(2 * numbers.size + 1, np.uint32), np.empty(numbers.size + 2, np.uint32)
    following = _split(numbers, contexts, symbols, counts, extra)
    table = _logarithms(counts)
    size = _encode(symbols, contexts, _starts(table), coded)
    return pack_stream(table) + store_stream(coded[:size]) + store_stream(extra[:following])


def read_numbers(reader: StreamReader, contexts: Bytes, *, kinds: int, bits: int) -> Numbers:
    """The opposite: as many numbers as there are contexts. Raises: DigestMismatch."""
    table, coded, extra = reader.stream(), reader.units(), reader.units()
    if table.size != kinds * _symbols(bits) or table.max(initial=0) >= len(_WEIGHTS):
        raise DigestMismatch("a frame's tables are malformed; fetch it again")
    starts = _starts(table.reshape(kinds, -1))
    if not _has_tables(contexts, starts[:, -1] == _TOTAL):
        raise DigestMismatch("a frame's tables leave out what it uses; fetch it again")
    numbers = np.empty(contexts.size, np.uint64)
    if not _decode(coded, extra, contexts, starts, _lookup(starts), numbers):
        raise DigestMismatch("a frame's numbers do not add up; fetch it again")
    return numbers
