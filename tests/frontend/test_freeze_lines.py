"""Freezes read as they were written."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.selectors.pages_cadence import freeze_text
from frontend.forms.freezes import freezes_parse
from rl_core.shipping.specs import DateFreeze, Freeze, OnceFreeze, WeeklyFreeze

CLOCKS = st.builds(lambda minutes: f"{minutes // 60:02d}:{minutes % 60:02d}", st.integers(0, 1439))
WEEKLY = (
    st.tuples(st.sets(st.integers(0, 6), min_size=1), CLOCKS, CLOCKS | st.just("24:00"))
    .filter(lambda made: made[1] != made[2])
    .map(lambda made: WeeklyFreeze(days=tuple(sorted(made[0])), start=made[1], end=made[2]))
)
DATES = st.dates(date(2020, 1, 1), date(2099, 12, 31)).map(lambda day: DateFreeze(date=day))
ONCE = st.builds(
    lambda start, length: OnceFreeze(start=start, end=start + timedelta(seconds=length)),
    st.datetimes(datetime(2020, 1, 1), datetime(2090, 1, 1)).map(lambda at: at.replace(microsecond=0, tzinfo=UTC)),
    st.integers(1, 10**7),
)


@given(st.lists(WEEKLY | DATES | ONCE, max_size=5))
def test_freezes_read_as_they_were_written(freezes: list[Freeze]) -> None:
    found, wrong = freezes_parse("\n".join(freeze_text(freeze) for freeze in freezes))
    assert wrong == []
    assert msgspec.convert(found, type=list[Freeze]) == freezes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sometimes", "write weekly"),
        ("weekly", "write weekly"),
        ("weekly Sat 18:00", "write weekly"),
        ("weekly Sat 18:00-18:00", "start and end are the same"),
        ("weekly Sat 25:00-26:00", "not a time of day"),
        ("weekly , 10:00-11:00", "at least one day"),
        ("date tomorrow", "Invalid RFC3339"),
        ("once 2026-12-24T18:00:00+01:00 2026-12-23T18:00:00+01:00", "end must be after start"),
        ("once 2026-12-24T18:00:00 2026-12-27T08:00:00", "offset from UTC"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, message: str) -> None:
    found, [wrong] = freezes_parse(f"\n{line}\ndate 2026-12-25")
    assert wrong.startswith("line 2: ")
    assert message in wrong
    assert " - at " not in wrong
    assert len(found) == 1
