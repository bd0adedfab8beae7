"""When a lane's cadence is frozen, and until when. Moments carry an offset from UTC; answers are in UTC.

Freezes are said in local time and held as moments, so that a change of the clocks neither splits nor doubles one: a
freeze whose first or last minute falls into an hour that the clock skips or repeats lasts as long as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from rl_core.errors import SpecError
from rl_core.shipping.specs import (
    MINUTES_A_DAY,
    CadenceSpec,
    DateFreeze,
    Freeze,
    OnceFreeze,
    WeeklyFreeze,
    minutes_of,
    timezone_of,
)


def frozen_at(spec: CadenceSpec, at: datetime) -> Freeze | None:
    """The freeze that holds at that moment; of several, the one that ends last. Raises: SpecError without an offset."""
    found = _latest(spec, _aware(at))
    return found[0] if found else None


def thaws_at(spec: CadenceSpec, at: datetime) -> datetime:
    """The first moment from `at` on, in UTC, at which no freeze holds: `at` itself when nothing is frozen then."""
    moment = _aware(at).astimezone(UTC)
    # Weekly freezes leave a gap in every week (the spec sees to it) and the others are finitely many, so this ends.
    while (found := _latest(spec, moment)) is not None:
        moment = found[1]
    return moment


def interval_effective_s(spec: CadenceSpec, delay_p95_s: float | None) -> float:
    """Seconds between two slots: never less than the time within which 95 % of feedback arrives. 0: by hand alone."""
    if spec.interval_s == 0:
        return 0.0
    return max(spec.interval_s, delay_p95_s or 0.0)


def _latest(spec: CadenceSpec, at: datetime) -> tuple[Freeze, datetime] | None:
    zone = timezone_of(spec.timezone)
    holding = [
        (freeze, end)
        for freeze in spec.freezes
        for start, end in _spans(freeze, zone, around=at.astimezone(zone).date())
        if start <= at < end
    ]
    return max(holding, key=lambda pair: pair[1], default=None)


def _spans(freeze: Freeze, zone: ZoneInfo, *, around: date) -> Iterator[tuple[datetime, datetime]]:
    """Moments between which the freeze holds, of all spans that can touch the day."""
    if isinstance(freeze, OnceFreeze):
        yield freeze.start.astimezone(UTC), freeze.end.astimezone(UTC)
    elif isinstance(freeze, DateFreeze):
        yield _span(freeze.date, 0, MINUTES_A_DAY, zone)
    else:
        yield from _weekly_spans(freeze, zone, around=around)


def _weekly_spans(freeze: WeeklyFreeze, zone: ZoneInfo, *, around: date) -> Iterator[tuple[datetime, datetime]]:
    first = minutes_of(freeze.start)
    for offset in (-1, 0, 1):  # one of yesterday may last into the day; near a clock change one of tomorrow may begin
        day = around + timedelta(days=offset)
        if day.weekday() in freeze.days:
            yield _span(day, first, first + freeze.length_minutes, zone)


def _span(day: date, first: int, last: int, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """From the earliest moment that the first minute can mean to the latest that the last can."""
    return min(moments_of(day, first, zone)), max(moments_of(day, last, zone))


def moments_of(day: date, minute: int, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Both moments that a local minute can mean. They differ only where the clock skips or repeats it."""
    local = datetime.combine(day, time()) + timedelta(minutes=minute)
    early, late = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return early, late


def _aware(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise SpecError("a moment needs an offset from UTC")
    return at
