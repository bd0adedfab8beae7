"""Comparisons of 64 words at once, for compiled loops: the answers are the bits of an integer, the first word's lowest.

One vector instruction compares as many words as fit a register, and what it answers is that mask. Compilers do not
find it from a loop, so it is written down as such; LLVM has it for every processor. None checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

AT_ONCE: Final = 64  # words

_BITS: Final = ir.IntType(AT_ONCE)


@intrinsic  # type: ignore[untyped-decorator]
def differing(_: Any, old: Any, new: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """`old[at + i] != new[at + i]`, for two arrays of one type of words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        was, now = (_load(context, builder, signature.args[i], args[i], args[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", was, now), _BITS)

    return types.uint64(old, new, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def any_differs(_: Any, old: Any, new: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """Whether any of these words differs, which takes fewer instructions than to say which."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        was, now = (_load(context, builder, signature.args[i], args[i], args[2]) for i in (0, 1))
        bits = ir.IntType(AT_ONCE * signature.args[0].dtype.bitwidth)
        return builder.icmp_unsigned("!=", builder.bitcast(builder.xor(was, now), bits), ir.Constant(bits, 0))

    return types.boolean(old, new, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def smaller(_: Any, words: Any, at: Any, low: Any) -> tuple[Any, Callable[..., Any]]:
    """Whether the magnitude of `words[at + i]`, the word without its sign bit, is below `low`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], args[0], args[1])
        width = signature.args[0].dtype.bitwidth
        magnitudes = builder.and_(loaded, ir.Constant(loaded.type, [(1 << (width - 1)) - 1] * AT_ONCE))
        first = ir.Constant(ir.VectorType(ir.IntType(32), AT_ONCE), [0] * AT_ONCE)
        unset = ir.Constant(loaded.type, ir.Undefined)
        lows = builder.shuffle_vector(builder.insert_element(unset, args[2], first.type.element(0)), unset, first)
        return builder.bitcast(builder.icmp_unsigned("<", magnitudes, lows), _BITS)

    return types.uint64(words, types.int64, words.dtype), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest(_: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """The number of the lowest bit that is set; 64 if none is."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def ones(_: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """How many bits are set."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


def _load(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """`AT_ONCE` words from `at` on, wherever they lie in memory."""
    width = array_type.dtype.bitwidth
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [at])
    vector = ir.VectorType(ir.IntType(width), AT_ONCE)
    return builder.load(builder.bitcast(data, vector.as_pointer()), align=width // 8)
