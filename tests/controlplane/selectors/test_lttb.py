"""Largest-Triangle-Three-Buckets against values worked out by hand, and its promises."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.selectors.lttb import lttb


def test_a_spike_is_kept() -> None:
    # Buckets of [1, 2] and [3, 4]; between (0, 0) and the mean of [3, 4] = (3.5, 0) the point (2, 5) spans the
    # larger triangle; then between (2, 5) and the last (5, 0): area of (3, 0) is |(2-5)(0-5) - (2-3)(0-5)| = 10,
    # of (4, 0) is |(2-5)(0-5) - (2-4)(0-5)| = 5.
    assert lttb([0, 1, 2, 3, 4, 5], [0, 0, 5, 0, 0, 0], 4) == [0, 2, 3, 5]


def test_few_points_are_left_alone() -> None:
    assert lttb([0, 1, 2], [5, 6, 7], 3) == [0, 1, 2]
    assert lttb([], [], 3) == []


def test_a_line_is_thinned_evenly() -> None:
    kept = lttb(list(range(1000)), [2.0 * x for x in range(1000)], 12)
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert len(kept) == 12
    assert max(gaps) <= 200


@pytest.mark.parametrize(("limit", "ys"), [(2, [0.0]), (3, [0.0, 1.0])])
def test_senseless_arguments_are_refused(limit: int, ys: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 3"):
        lttb([0.0], ys, limit)


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(3, 60))
def test_ascending_unique_bounded_with_both_ends(ys: list[float], limit: int) -> None:
    kept = lttb(list(range(len(ys))), ys, limit)
    assert len(kept) == min(limit, len(ys))
    assert kept == sorted(set(kept))
    if ys:
        assert (kept[0], kept[-1]) == (0, len(ys) - 1)


def test_a_lonely_spike_is_kept():
    ys = [math.sin(x / 50) + (9.0 if x == 617 else 0.0) for x in range(2000)]
    assert 617 in lttb(list(range(2000)), ys, 40)
