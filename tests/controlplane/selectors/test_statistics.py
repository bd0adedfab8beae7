"""Bootstrap intervals against values that can be worked out."""

from __future__ import annotations

import random

import pytest

from controlplane.selectors.statistics import crossed_interval, difference_interval, paired_interval


def test_constant_differences_have_no_width():
    interval = paired_interval([0.5] * 10)
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.5, 0.5, 0.5, 10)
    assert interval.above_zero


def test_interval_is_near_the_normal_one():
    generator = random.Random(1)
    values = [generator.gauss(1.0, 2.0) for _ in range(400)]
    interval = paired_interval(values)
    mean = sum(values) / 400
    deviation = (sum((value - mean) ** 2 for value in values) / 399) ** 0.5
    assert interval.mean == pytest.approx(mean)
    assert interval.low == pytest.approx(mean - 1.96 * deviation / 20, abs=0.03)
    assert interval.high == pytest.approx(mean + 1.96 * deviation / 20, abs=0.03)


def test_no_effect_is_not_above_zero():
    assert not paired_interval([-1.0, 1.0] * 20).above_zero


def test_difference_of_two_groups_is_last_minus_first():
    interval = difference_interval([0.0, 0.2, 0.1], [0.9, 1.0, 0.8])
    assert interval.mean == pytest.approx(0.8)
    assert 0.5 < interval.low <= 0.8 <= interval.high < 1.0


def test_a_table_is_as_uncertain_as_its_rows_and_its_columns_together():
    generator = random.Random(2)
    rows, columns = 60, 30
    by_row = [generator.gauss(0, 1) for _ in range(rows)]
    by_column = [generator.gauss(0, 1) for _ in range(columns)]
    cells = [[1 + row + column for column in by_column] for row in by_row]
    interval = crossed_interval(cells)
    width = 1.96 * (1 / rows + 1 / columns) ** 0.5  # variance 1 along either
    assert interval.n == columns
    assert interval.mean == pytest.approx(1 + sum(by_row) / rows + sum(by_column) / columns)
    assert interval.high - interval.low == pytest.approx(2 * width, rel=0.25)
    # Rows alone would promise far too much.
    alone = paired_interval([sum(row) / columns for row in cells])
    assert alone.high - alone.low < 0.75 * (interval.high - interval.low)
    with pytest.raises(ValueError, match="cells"):
        crossed_interval([[]])


def test_the_same_seed_gives_the_same_interval():
    values = [0.1, 0.7, -0.3, 0.4, 0.33, -0.21, 0.05, 0.9, 0.62, 0.11]
    assert paired_interval(values, seed=3) == paired_interval(values, seed=3)
    assert paired_interval(values, seed=3) != paired_interval(values, seed=4)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match=r"empty|at least one"):
        paired_interval([])
