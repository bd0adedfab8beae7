"""Charts drawn on the server, and the durations beside them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.selectors.pages_releases import EffectRow, Finding
from controlplane.selectors.pages_signal_map import Bin
from frontend.durations import duration_parse, duration_text, number_text
from frontend.templatetags.charts import FINDING_LOOKS, WIDTH, finding, forest, histogram, interval
from frontend.templatetags.slipway import glimpse, until_text


def row(**changes: Any) -> EffectRow:
    values: dict[str, Any] = {"name": "m", "role": "goal", "sign": 1, "margin": 0.1}
    return EffectRow(**{**values, "difference": 0.0, "low": -0.05, "high": 0.05, **changes})


@pytest.mark.parametrize(
    ("low", "high", "sign", "said"),
    [
        (0.01, 0.2, 1, Finding.BETTER),
        (-0.05, 0.2, 1, Finding.NO_WORSE),
        (-0.2, 0.2, 1, Finding.OPEN),
        (-0.3, -0.15, 1, Finding.WORSE),
        (0.15, 0.3, -1, Finding.WORSE),
        (-0.3, -0.15, -1, Finding.BETTER),
        (-0.05, 0.05, -1, Finding.NO_WORSE),
        (None, None, 1, Finding.NO_DATA),
    ],
)
def test_what_an_interval_says(low: float | None, high: float | None, sign: int, said: Finding) -> None:
    assert row(low=low, high=high, sign=sign).finding is said
    assert said.value in finding(row(low=low, high=high, sign=sign))


def test_every_finding_has_a_look() -> None:
    assert set(FINDING_LOOKS) == set(Finding)


def circle(drawn: str) -> float:
    found = re.search(r'<circle cx="([\d.]+)"', drawn)
    assert found is not None
    return float(found[1])


def test_better_is_to_the_right_whichever_way_that_is() -> None:
    assert circle(forest(row(difference=0.08))) > WIDTH / 2
    assert circle(forest(row(difference=-0.08))) < WIDTH / 2
    assert circle(forest(row(difference=-0.08, sign=-1))) > WIDTH / 2


def test_one_margin_lies_at_the_same_place_for_every_metric() -> None:
    def margin(drawn: str) -> str:
        found = re.search(r'class="margin" d="M([\d.]+) ', drawn)
        assert found is not None
        return found[1]

    assert margin(forest(row())) == margin(forest(row(margin=50.0, low=-30.0, high=4.0, sign=-1)))
    assert float(margin(forest(row()))) < WIDTH / 2


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.floats(0, 1e6), st.sampled_from([1, -1]))
def test_nothing_is_drawn_outside(middle: float, half: float, margin: float, sign: int) -> None:
    drawn = forest(row(difference=middle, low=middle - half, high=middle + half, margin=margin, sign=sign))
    for number in re.findall(r"[MHL ](-?[\d.]+)", " ".join(re.findall(r'd="([^"]+)"', drawn))):
        assert -8 <= float(number) <= WIDTH + 8, drawn
    assert 0 <= circle(drawn) <= WIDTH
    assert "nan" not in drawn


def test_intervals_are_written_with_their_signs() -> None:
    assert interval(row(difference=0.25, low=-0.05, high=0.55)) == "+0.25 [−0.05, +0.55]"
    assert interval(row(difference=0.0, low=None, high=None)) == "±0 [no interval yet]"
    assert interval(row(difference=None, low=None, high=None)) == "—"


def test_a_histogram_draws_both_distributions_to_one_scale() -> None:
    bins = [Bin(-1, 0, 10, 0), Bin(0, 1, 5, 20)]
    heights = [float(text) for text in re.findall(r'height="([\d.]+)"', histogram(bins))]
    assert heights[0] == pytest.approx(heights[3] / 2, abs=0.2)
    assert heights[1] == 0
    assert 'class="before"' in histogram([Bin(-1, 1, 0, 0)])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90 s", 90), ("90", 90), ("1.5 h", 5400), ("15min", 900), ("2 d", 172800), ("0", 0), (" 5 h ", 18000)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_parse(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5 s", "5 weeks", "1e3 s", "nan", "٣ s", "9" * 400])
def test_what_is_no_duration_is_none(text: str) -> None:
    assert duration_parse(text) is None


@given(st.integers(0, 10**7))
def test_a_duration_reads_as_it_was_written(seconds: int) -> None:
    assert duration_parse(duration_text(float(seconds))) == seconds


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_as_it_was_written(value: float) -> None:
    assert float(number_text(value)) == value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "now"),
        (0, "now"),
        (59, "in 59 s"),
        (61, "in 1 min 01 s"),
        (3600, "in 1 h 00 min"),
        (90_000, "in 1 d 1 h"),
    ],
)
def test_countdowns(seconds: int, text: str) -> None:
    now = datetime(2026, 9, 1, tzinfo=UTC)
    assert until_text(now + timedelta(seconds=seconds), now) == text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"question": "2 boxes\n with 3 pens?"}, "question: 2 boxes with 3 pens?"),
        ({"files": {"a.py": "…", "b.py": "…"}, "entry": 1}, "files: 2 of them · entry: 1"),
        (["a", "b", "c"], "3 of them"),
        ({str(number): number for number in range(9)}, "0: 0 · 1: 1 · 2: 2"),
        ("x" * 300, "x" * 79 + "…"),
        ({}, ""),
    ],
)
def test_a_glimpse_is_one_short_line(value: Any, line: str) -> None:
    assert glimpse(value) == line
