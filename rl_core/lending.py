"""When a serving cluster lends replicas to rollouts: its spec, its weekly windows, and what a load says.

Users come first throughout: a window that the clocks touch is as short as it can be, a load that is not known lends
nothing, and between "may lend" and "must come back" lies a gap in which nothing changes.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from rl_core.errors import SpecError
from rl_core.shipping.freezes import moments_of
from rl_core.shipping.specs import MINUTES_A_DAY, minutes_of, timezone_of

MAX_WINDOWS = 64
MAX_QUERY_CHARS = 2_000


class LoadSource(StrEnum):
    """Where a cluster's load is read."""

    NONE = "none"  # nowhere: the windows alone decide
    GATEWAY = "gateway"  # requests of users that were under way, a second, for each replica that answers
    PROMETHEUS = "prometheus"  # whatever the query gives


class LendingWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hours on some days of every week in which the cluster lends, local time. 0 is Monday.

    An `end` at or before `start` lies on the following day; `24:00` is the day's end.
    """

    days: tuple[int, ...]
    start: str = "00:00"
    end: str = "24:00"

    def __post_init__(self) -> None:
        if not self.days or not all(0 <= day <= 6 for day in self.days):
            raise SpecError(f"days must name days from 0 (Monday) to 6, not {self.days}")
        if minutes_of(self.start) >= MINUTES_A_DAY:
            raise SpecError(f"start must be before 24:00, not {self.start}")
        if minutes_of(self.start) == minutes_of(self.end):
            raise SpecError("start and end are the same: the window is empty")

    @property
    def length_minutes(self) -> int:
        """How long the window is on the clock."""
        return (minutes_of(self.end) - minutes_of(self.start) - 1) % MINUTES_A_DAY + 1


class LendingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a cluster lends. Without windows, at any hour; without a source of load, whatever its users do.

    A load below `lend_below` for `settle_s` lends one replica more, as long as `keep` are not lent; one above
    `return_above` calls all back. Both are in the unit of the source. Gateway requests are counted over `window_s`.
    A replica that was called back holds no training version any more `return_within_s` later, and a window's end is
    when replicas are back. `sessions` is what each lent replica may roll out at once.
    """

    timezone: str = "UTC"
    windows: tuple[LendingWindow, ...] = ()
    source: LoadSource = LoadSource.NONE
    prometheus_url: str = ""
    prometheus_query: str = ""
    lend_below: float = 0.0
    return_above: float = 0.0
    settle_s: float = 300.0
    window_s: float = 60.0
    return_within_s: float = 120.0
    keep: int = 1
    sessions: int = 8

    def __post_init__(self) -> None:
        timezone_of(self.timezone)
        _require(len(self.windows) <= MAX_WINDOWS, f"at most {MAX_WINDOWS} windows, not {len(self.windows)}")
        _require(bool(self.windows) or self.source is not LoadSource.NONE, "name windows, a source of load, or both")
        for name, least, most in (
            ("settle_s", 0, 86_400),
            ("window_s", 5, 3_600),
            ("return_within_s", 5, 86_400),
            ("keep", 0, 10_000),
            ("sessions", 1, 10_000),
        ):
            value = getattr(self, name)
            _require(least <= value <= most, f"{name} must be in [{least}, {most}], not {value}")
        if self.source is not LoadSource.NONE:
            apart = 0 <= self.lend_below < self.return_above < float("inf")
            _require(apart, "lend_below must be at least 0 and less than return_above: between them nothing changes")
        wanted = self.source is LoadSource.PROMETHEUS
        named = bool(self.prometheus_url and self.prometheus_query)
        _require(named or not wanted, "a load from Prometheus needs prometheus_url and prometheus_query")
        _require(len(self.prometheus_query) <= MAX_QUERY_CHARS, f"prometheus_query is over {MAX_QUERY_CHARS} long")


def lending_parse(data: dict[str, Any]) -> LendingSpec:
    """Validate a spec given as a mapping. Raises: SpecError, naming the key."""
    try:
        return msgspec.convert(data, type=LendingSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"the lending policy is not valid: {error}") from error


def lending_resolve(spec: LendingSpec) -> dict[str, Any]:
    """The spec as plain JSON data with every default filled in."""
    resolved: dict[str, Any] = msgspec.to_builtins(spec)
    return resolved


def lending_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, for forms and the API document."""
    return msgspec.json.schema(LendingSpec)


def open_until(spec: LendingSpec, at: datetime) -> datetime | None:
    """When the windows that hold at `at` end, in UTC; None when none does. `at` carries an offset from UTC.

    Windows that touch are one. Where the clocks are changed within a window, it begins at the later and ends at the
    earlier of the moments that its local minutes can mean: never longer than anybody expects.
    """
    if at.tzinfo is None:
        raise SpecError("a moment needs an offset from UTC")
    if not spec.windows:
        return datetime.max.replace(tzinfo=UTC)
    zone, end = timezone_of(spec.timezone), at.astimezone(UTC)
    while True:
        later = _end_of(spec, zone, end)
        if later is None or later - at > timedelta(days=8):  # a week of windows without a gap has no end
            return end if end > at else later
        end = later


def _end_of(spec: LendingSpec, zone: ZoneInfo, at: datetime) -> datetime | None:
    """The latest end among the windows that hold at a moment."""
    today = at.astimezone(zone).date()
    days = [today + timedelta(days=offset) for offset in (-1, 0, 1)]
    spans = [_span(day, window, zone) for window in spec.windows for day in days if day.weekday() in window.days]
    return max((end for start, end in spans if start <= at < end), default=None)


def _span(day: date, window: LendingWindow, zone: ZoneInfo) -> tuple[datetime, datetime]:
    first = minutes_of(window.start)
    return max(moments_of(day, first, zone)), min(moments_of(day, first + window.length_minutes, zone))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise SpecError(message)
