"""Patterns of other people: what compiles, and what would take the machine with it."""

import resource
import subprocess
import sys

import pytest

from rl_core.environments.patterns import MAX_PATTERN_CHARS, compile_pattern
from rl_core.errors import SpecError


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", "2026-01-31"),
        ("(?i)sorry", "I am Sorry."),
        (r"^.{1,100} .{1,100} .{1,100}$", "one two three"),
        ("a{9999}", "a" * 9999),
        ("x{", "x{"),
    ],
)
def test_what_people_write_compiles_and_matches(pattern, text):
    assert compile_pattern(pattern).search(text)
    assert not compile_pattern(pattern).search("?")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "does not compile"),
        ("a" * (MAX_PATTERN_CHARS + 1), "too long"),
        ("a{100000000}", "repeats too much"),
        ("a{ 100000000}", "repeats too much"),
        ("((((a{100}){100}){100}){100}){100}", "repeats too much"),
        ("((a{100}b?){100}c?){100}", "repeats too much"),
        ("a{" + "9" * 400 + "}", "repeats too much"),
    ],
)
def test_what_would_take_all_memory_is_refused(pattern, message):
    with pytest.raises(SpecError, match=message):
        compile_pattern(pattern)


def test_without_the_bound_a_short_pattern_takes_all_memory():
    """The control: in a process of its own with half a gigabyte."""
    code = "import regex; regex.compile('((((((a{10}){10}){10}){10}){10}){10}){10}')"
    limit = 512 * 1024 * 1024
    ended = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        check=False,
    )
    assert b"MemoryError" in ended.stderr
