"""64 words at once against numpy, one by one: every width, wherever the words lie."""

import numba
import numpy as np
import pytest

from rl_core.delta.masks import AT_ONCE, differing, lowest, ones, smaller

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


@numba.njit
def compare(old, new, at, low):
    changed = differing(old, new, at)
    return changed, smaller(old, at, low), lowest(changed), ones(changed)


@pytest.mark.parametrize("word", WIDTHS)
def test_each_bit_is_what_its_word_answers(word):
    rng = np.random.default_rng(1)
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    for at in (0, 1, 7, 36):
        old = np.frombuffer(rng.bytes(100 * np.dtype(word).itemsize), word).copy()
        new = np.where(rng.random(100) < 0.3, old ^ word(sign), old)
        new[at + 5] = old[at + 5] ^ word(1)
        low = old[at + 9] & word(sign - 1)  # a word as large as the bound is not below it
        was, now = old[at : at + AT_ONCE], new[at : at + AT_ONCE]
        changed, below, first, count = compare(old, new, at, low)
        assert changed == sum(1 << int(i) for i in np.flatnonzero(was != now))
        assert below == sum(1 << int(i) for i in np.flatnonzero((was & word(sign - 1)) < low))
        assert first == np.flatnonzero(was != now)[0]
        assert count == np.count_nonzero(was != now)
        assert compare(old, new, at, word(sign))[1] == (1 << AT_ONCE) - 1
        assert compare(old, old, at, low)[::2] == (0, AT_ONCE)
