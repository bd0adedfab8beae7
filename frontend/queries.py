"""Reading a query string: what does not parse counts as not asked for, and is never an error page."""

from __future__ import annotations

import math
from uuid import UUID

from django.http import QueryDict

_MAX_TEXT_CHARS = 200
_MAX_WHOLE = 2**31 - 1


def text_of(query: QueryDict, name: str) -> str:
    """A text, trimmed, without NUL (PostgreSQL refuses it), at most 200 characters."""
    return query.get(name, "").replace("\x00", "").strip()[:_MAX_TEXT_CHARS]


def uuid_of(query: QueryDict, name: str) -> UUID | None:
    """A UUID, or None."""
    try:
        return UUID(query.get(name, ""))
    except ValueError:
        return None


def whole_of(query: QueryDict, name: str) -> int | None:
    """A whole number from 0, or None."""
    value = query.get(name, "")
    return min(int(value), _MAX_WHOLE) if value.isascii() and value.isdigit() and len(value) < 19 else None


def number_of(query: QueryDict, name: str) -> float | None:
    """A finite number, or None."""
    try:
        value = float(query.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def choice_of(query: QueryDict, name: str, choices: list[str] | tuple[str, ...], default: str = "") -> str:
    """One of the choices, or the default."""
    value = query.get(name, "")
    return value if value in choices else default
