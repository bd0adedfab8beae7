"""Freezes hold in local time, over changes of the clock, and end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SpecError
from rl_core.shipping.freezes import frozen_at, interval_effective_s, thaws_at
from rl_core.shipping.specs import CadenceSpec, DateFreeze, OnceFreeze, WeeklyFreeze, cadence_parse

NEW_YORK = "America/New_York"


def weekly(*days: int, start: str = "00:00", end: str = "24:00") -> dict[str, object]:
    return {"kind": "weekly", "days": list(days), "start": start, "end": end}


def cadence(*freezes: dict[str, object], timezone: str = "UTC") -> CadenceSpec:
    return cadence_parse({"freezes": list(freezes), "timezone": timezone})


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_a_weekly_freeze_holds_from_its_first_minute_until_before_its_last():
    spec = cadence(weekly(0, start="09:00", end="17:00"))  # 2026-03-02 is a Monday
    assert frozen_at(spec, at("2026-03-02T08:59:59Z")) is None
    assert isinstance(frozen_at(spec, at("2026-03-02T09:00:00Z")), WeeklyFreeze)
    assert frozen_at(spec, at("2026-03-02T17:00:00Z")) is None
    assert frozen_at(spec, at("2026-03-03T12:00:00Z")) is None
    assert thaws_at(spec, at("2026-03-02T10:00:00Z")) == at("2026-03-02T17:00:00Z")


def test_nothing_to_wait_for_is_answered_with_the_moment_itself():
    assert thaws_at(cadence(), at("2026-03-02T10:00:00+02:00")) == at("2026-03-02T08:00:00Z")


def test_a_freeze_over_midnight_belongs_to_the_day_it_begins_on():
    spec = cadence(weekly(4, start="18:00", end="06:00"))  # Friday evening
    assert frozen_at(spec, at("2026-03-07T05:59:00Z")) is not None
    assert frozen_at(spec, at("2026-03-06T05:59:00Z")) is None
    assert thaws_at(spec, at("2026-03-06T23:00:00Z")) == at("2026-03-07T06:00:00Z")


def test_local_time_decides():
    spec = cadence(weekly(4, start="18:00", end="24:00"), timezone="Asia/Tokyo")
    assert frozen_at(spec, at("2026-03-06T09:00:00Z")) is not None  # 18:00 in Tokyo
    assert frozen_at(spec, at("2026-03-06T18:00:00Z")) is None


def test_freezes_that_touch_are_waited_out_together():
    spec = cadence(
        weekly(4, start="12:00", end="24:00"),
        {"kind": "date", "date": "2026-03-07"},
        {"kind": "once", "start": "2026-03-08T00:00:00Z", "end": "2026-03-08T03:30:00Z"},
    )
    assert thaws_at(spec, at("2026-03-06T13:00:00Z")) == at("2026-03-08T03:30:00Z")
    assert isinstance(frozen_at(spec, at("2026-03-07T13:00:00Z")), DateFreeze)
    assert isinstance(frozen_at(spec, at("2026-03-08T03:00:00Z")), OnceFreeze)


def test_of_two_freezes_the_longer_is_named():
    spec = cadence(weekly(0, start="09:00", end="10:00"), {"kind": "date", "date": "2026-03-02"})
    assert isinstance(frozen_at(spec, at("2026-03-02T09:30:00Z")), DateFreeze)


@pytest.mark.parametrize(
    ("freeze", "begins", "ends"),
    [
        # The clock skips 02:00 to 03:00: a whole day has 23 hours.
        ({"kind": "date", "date": "2026-03-08"}, "2026-03-08T05:00:00Z", "2026-03-09T04:00:00Z"),
        # It repeats 01:00 to 02:00: a whole day has 25.
        ({"kind": "date", "date": "2026-11-01"}, "2026-11-01T04:00:00Z", "2026-11-02T05:00:00Z"),
        # From before to after the skipped hour: an hour less than the clock says.
        (weekly(6, start="01:00", end="04:00"), "2026-03-08T06:00:00Z", "2026-03-08T08:00:00Z"),
        # Begins and ends within the repeated hour: from its first to its second passing, without a hole.
        (weekly(6, start="01:15", end="01:45"), "2026-11-01T05:15:00Z", "2026-11-01T06:45:00Z"),
        # Ends within the skipped hour: as long as it can last.
        (weekly(6, start="01:00", end="02:30"), "2026-03-08T06:00:00Z", "2026-03-08T07:30:00Z"),
        # Begins on the day before the change and ends after it.
        (weekly(5, start="22:00", end="05:00"), "2026-03-08T03:00:00Z", "2026-03-08T09:00:00Z"),
    ],
)
def test_changes_of_the_clock_neither_split_nor_double_a_freeze(freeze, begins, ends):
    spec, begin, end = cadence(freeze, timezone=NEW_YORK), at(begins), at(ends)
    second = timedelta(seconds=1)
    assert frozen_at(spec, begin - second) is None
    assert frozen_at(spec, begin) is not None
    assert frozen_at(spec, end - second) is not None
    assert frozen_at(spec, end) is None
    assert thaws_at(spec, begin) == end


@settings(max_examples=60, deadline=None)
@given(
    days=st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True),
    start=st.integers(0, 1439),
    length=st.integers(1, 1439),
    zone=st.sampled_from([NEW_YORK, "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
    moment=st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC)),
)
def test_after_a_thaw_nothing_is_frozen_and_before_it_everything_is(days, start, length, zone, moment):
    clock = "{:02d}:{:02d}".format
    end = (start + length) % 1440
    spec = cadence(weekly(*days, start=clock(*divmod(start, 60)), end=clock(*divmod(end, 60))), timezone=zone)
    thaw = thaws_at(spec, moment)
    assert thaw >= moment
    assert frozen_at(spec, thaw) is None
    span = thaw - moment
    assert all(frozen_at(spec, moment + span * part / 7) is not None for part in range(7) if span)


def test_a_moment_without_an_offset_is_refused():
    with pytest.raises(SpecError, match="offset"):
        frozen_at(cadence(), datetime(2026, 3, 2))


def test_the_interval_is_never_shorter_than_feedback_takes():
    spec = cadence_parse({"interval_s": 3600})
    assert interval_effective_s(spec, None) == 3600
    assert interval_effective_s(spec, 600) == 3600
    assert interval_effective_s(spec, 7200) == 7200
    assert interval_effective_s(cadence_parse({}), 7200) == 0
