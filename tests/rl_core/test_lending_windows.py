"""When a cluster lends: windows in local time over changes of the clocks, and specs that are refused."""

from datetime import UTC, datetime, timedelta

import pytest

from rl_core.errors import SpecError
from rl_core.lending import LendingSpec, LendingWindow, LoadSource, lending_parse, lending_resolve, open_until

BERLIN = "Europe/Berlin"
NIGHT = LendingWindow(days=(0, 1, 2, 3, 4, 5, 6), start="22:00", end="06:00")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ends(spec: LendingSpec, at: str) -> str | None:
    end = open_until(spec, utc(at))
    return end.strftime("%m-%d %H:%M") if end else None


@pytest.mark.parametrize(
    ("at", "end"),
    [
        ("2026-11-30T20:59", None),
        ("2026-11-30T21:00", "12-01 05:00"),  # 22:00 in Berlin
        ("2026-12-01T04:59", "12-01 05:00"),
        ("2026-12-01T05:00", None),
        # Clocks go forward on 29 March: the night is an hour shorter, and ends at 06:00 of the new time.
        ("2026-03-28T21:00", "03-29 04:00"),
        ("2026-03-29T04:00", None),
        ("2026-03-29T20:00", "03-30 04:00"),  # 22:00 of the new time
        # Clocks go back on 25 October: the night is an hour longer.
        ("2026-10-24T20:00", "10-25 05:00"),
        ("2026-10-25T04:59", "10-25 05:00"),
        ("2026-10-25T20:30", None),
    ],
)
def test_a_night_in_local_time_over_changes_of_the_clocks(at, end):
    assert ends(LendingSpec(timezone=BERLIN, windows=(NIGHT,)), at) == end


def test_a_window_whose_edges_the_clocks_touch_is_as_short_as_it_can_be():
    """02:30 comes twice on 25 October and not at all on 29 March."""
    begins = LendingSpec(timezone=BERLIN, windows=(LendingWindow(days=(6,), start="02:30", end="04:00"),))
    assert ends(begins, "2026-10-25T00:45") is None  # the first 02:30 is past, the second is not
    assert ends(begins, "2026-10-25T01:45") == "10-25 03:00"
    stops = LendingSpec(timezone=BERLIN, windows=(LendingWindow(days=(6,), start="01:00", end="02:30"),))
    assert ends(stops, "2026-10-25T00:15") == "10-25 00:30"
    assert ends(stops, "2026-10-25T00:45") is None
    assert ends(stops, "2026-03-29T00:15") == "03-29 00:30"


def test_windows_that_touch_are_one():
    late = LendingWindow(days=(0,), start="20:00", end="24:00")
    early = LendingWindow(days=(1,), start="00:00", end="03:00")
    apart = LendingWindow(days=(1,), start="04:00", end="05:00")
    spec = LendingSpec(windows=(apart, early, late))
    assert ends(spec, "2026-11-30T21:00") == "12-01 03:00"  # a Monday
    assert ends(spec, "2026-12-01T03:30") is None


def test_without_windows_and_with_a_week_of_them_there_is_no_end_in_sight():
    now = utc("2026-11-30T12:00")
    every_day = LendingSpec(windows=(LendingWindow(days=tuple(range(7))),))
    by_load = LendingSpec(source=LoadSource.GATEWAY, lend_below=1, return_above=2)
    for spec in (every_day, by_load):
        end = open_until(spec, now)
        assert end is not None
        assert end - now > timedelta(days=6)


def test_a_moment_without_an_offset_is_refused():
    with pytest.raises(SpecError, match="offset"):
        open_until(LendingSpec(windows=(NIGHT,)), datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({}, "windows"),
        ({"windows": [{"days": []}]}, "days"),
        ({"windows": [{"days": [7]}]}, "days"),
        ({"windows": [{"days": [0], "start": "06:00", "end": "06:00"}]}, "empty"),
        ({"windows": [{"days": [0], "start": "6:00"}]}, "HH:MM"),
        ({"windows": [{"days": [0], "hours": 3}]}, "hours"),
        ({"windows": [{"days": [0]}] * 65}, "windows"),
        ({"windows": [{"days": [0]}], "timezone": "Mars/Olympus"}, "timezone"),
        ({"source": "gateway", "lend_below": 2, "return_above": 2}, "lend_below"),
        ({"source": "gateway", "lend_below": -1, "return_above": 2}, "lend_below"),
        ({"source": "prometheus", "lend_below": 1, "return_above": 2}, "prometheus_url"),
        ({"source": "guess"}, "source"),
        ({"windows": [{"days": [0]}], "sessions": 0}, "sessions"),
        ({"windows": [{"days": [0]}], "return_within_s": float("nan")}, "return_within_s"),
        ({"windows": [{"days": [0]}], "keep": -1}, "keep"),
    ],
)
def test_what_is_wrong_is_refused_by_name(spec, names):
    with pytest.raises(SpecError, match=names):
        lending_parse(spec)


def test_a_resolved_spec_reads_back_as_the_same():
    spec = lending_parse({"windows": [{"days": [5, 6]}], "timezone": BERLIN, "keep": 2})
    assert lending_parse(lending_resolve(spec)) == spec
