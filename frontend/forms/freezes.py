"""Freezes as people type them, one a line: `weekly Sat,Sun 00:00-24:00`, `date 2026-12-25`, `once START END`."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.errors import SpecError
from rl_core.shipping.specs import Freeze

_DAYS = {name: number for number, name in enumerate(("mon", "tue", "wed", "thu", "fri", "sat", "sun"))}
MAX_LINES = 100


def freezes_parse(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The freezes as the spec wants them, and what is wrong with which line."""
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        words = line.split()
        if not words:
            continue
        try:
            data = _freeze(words)
            msgspec.convert(data, type=Freeze)
        except (ValueError, SpecError, msgspec.ValidationError) as error:
            wrong.append(f"line {number}: {str(error).split(' - at ')[0]}")
        else:
            found.append(data)
    return found, wrong


def _freeze(words: list[str]) -> dict[str, Any]:
    """Raises: ValueError, with what to write."""
    match words:
        case ["weekly", days, hours] if hours.count("-") == 1:
            start, end = hours.split("-")
            return {
                "kind": "weekly",
                "days": [day_of(day) for day in days.split(",") if day],
                "start": start,
                "end": end,
            }
        case ["weekly", days]:
            return {"kind": "weekly", "days": [day_of(day) for day in days.split(",") if day]}
        case ["date", date]:
            return {"kind": "date", "date": date}
        case ["once", start, end]:
            return {"kind": "once", "start": start, "end": end}
    raise ValueError("write weekly Sat,Sun 00:00-24:00, or date 2026-12-25, or once START END")


def day_of(name: str) -> int:
    """A day by its name, 0 for Monday. Raises: ValueError, with what to write."""
    try:
        return _DAYS[name.lower()[:3]]
    except KeyError as error:
        raise ValueError(f"{name[:20]!r} is no day; write Mon, Tue, Wed, Thu, Fri, Sat or Sun") from error
