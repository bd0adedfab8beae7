"""What is left of a model's edit, by values worked out by hand."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import SignalError
from rl_core.signals.edits import MAX_CHARACTERS, edit_persistence

BEFORE = "def f(a, b):\n    return a - b\n"
AFTER = "def f(a, b):\n    return a + b\n"
GROWN = BEFORE + "def g(x):\n    return x * 2\n"


@pytest.mark.parametrize(
    ("before", "after", "now", "share"),
    [
        (BEFORE, AFTER, AFTER, 1.0),
        (BEFORE, AFTER, BEFORE, 0.0),
        (BEFORE, AFTER, "def f(a, b):\n    # the sum\n    return   a + b\n", 1.0),
        (BEFORE, GROWN, GROWN, 1.0),
        (BEFORE, GROWN, BEFORE, 0.0),
        ("", GROWN, "", 0.0),
        # def g, g (, ( x, x ), ) : and so on: ten pairs with the line starts; `* 2` became `* 3`.
        (BEFORE, GROWN, BEFORE + "def g(x):\n    return x * 3\n", 0.9),
        # Only deleting: a line with the pairs ^log, log(, (a, a) goes, and half of it comes back.
        ("log(a)\nrun()\n", "run()\n", "run()\n", 1.0),
        ("log(a)\nrun()\n", "run()\n", "log(b)\nrun()\n", 0.5),
        # `one two` → `one three` adds (one, three) and takes (one, two).
        ("one two", "one three", "one four", 0.5),
        ("one two", "one three", "one two", 0.0),
    ],
)
def test_the_share_is_what_is_still_there(before, after, now, share):
    assert edit_persistence(before, after, now) == pytest.approx(share)


def test_moved_code_is_still_there():
    moved = "def g(x):\n    return x * 2\n\n\n" + BEFORE
    assert edit_persistence(BEFORE, GROWN, moved) == 1.0


def test_an_edit_that_changed_white_space_alone_says_nothing():
    assert edit_persistence("a = 1", "a  =  1\n\n", "") is None


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80))
def test_it_is_a_share_and_its_ends_are_right(before, after, now):
    share = edit_persistence(before, after, now)
    assert share is None or 0 <= share <= 1
    assert edit_persistence(before, after, after) in (None, 1.0)
    assert edit_persistence(before, after, before) in (None, 0.0)


def test_hostile_texts_cost_what_their_length_costs():
    """The same word over and over is the worst case of aligning differs: hours where this takes well under a second."""
    text = "a b " * (MAX_CHARACTERS // 4)
    started = time.process_time()
    assert edit_persistence(text, text[2:], text[4:] + "c") is not None
    assert time.process_time() - started < 30
    with pytest.raises(SignalError):
        edit_persistence(text + "aaaaaaaa", "", "")
