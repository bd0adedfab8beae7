"""Durations and numbers as people type and read them: `90 s`, `15 min`, `5 h`, `2 d`; a number alone is seconds."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TYPED = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d)?\s*", re.ASCII)
EXAMPLE = "90 s, 15 min, 5 h or 2 d"


def duration_parse(text: str) -> float | None:
    """Seconds; None for what is no duration."""
    typed = _TYPED.fullmatch(text)
    value = float(typed[1]) * _UNITS[typed[2] or ""] if typed else math.inf
    return value if math.isfinite(value) else None


def duration_text(seconds: float) -> str:
    """The duration in its largest whole unit."""
    for unit in ("d", "h", "min"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"


def number_text(value: float) -> str:
    """A number as short as it can be typed without changing it."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
