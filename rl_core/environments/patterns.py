"""Patterns that somebody else wrote, compiled within bounds. Matching them has a time limit besides."""

from __future__ import annotations

import math
import re

import regex

from rl_core.errors import SpecError

MAX_PATTERN_CHARS = 500
# `regex` writes out what must be repeated: a{100000000}, or ((a{100}){100}){100}, takes all memory there is.
MAX_REPETITIONS = 10_000
_REPETITION = re.compile(r"\{\s*(\d+)")


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern. Raises: SpecError for one that is too long, repeats too much or does not compile."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise SpecError(f"the pattern is too long: at most {MAX_PATTERN_CHARS} characters")
    if math.prod(max(1, int(count)) for count in _REPETITION.findall(pattern)) > MAX_REPETITIONS:
        raise SpecError(f"the pattern {pattern[:80]!r} repeats too much: at most {MAX_REPETITIONS} times in all")
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise SpecError(f"the pattern {pattern[:80]!r} does not compile: {error}") from error
