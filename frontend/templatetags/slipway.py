"""Filters and tags of the pages: numbers, times, states, sparklines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator

from controlplane.states import EventType
from frontend.looks import event_sentence, event_tone, look_of, version_name
from frontend.plain import visible as visible_html
from frontend.plain import visible_text

register = template.Library()
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_DASH = "—"
_GLIMPSE_FIELDS, _GLIMPSE_CHARS = 3, 160


def _number(value: Any) -> float | None:
    """A number, or None for what is not there: templates give the empty text for it."""
    return None if value is None or value == "" else float(value)


@register.filter
def quantity_bytes(value: Any) -> str:
    """Bytes in the largest unit that keeps the figure above one."""
    size = _number(value)
    if size is None:
        return _DASH
    for unit in _UNITS:
        if abs(size) < 1000 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


@register.filter
def figure(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits; thousands are grouped."""
    number = _number(value)
    if number is None:
        return _DASH
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    if abs(number) >= 10**digits:
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


@register.filter
def percent(value: Any, digits: int = 1) -> str:
    """A share as percent."""
    share = _number(value)
    return _DASH if share is None else f"{100 * share:.{digits}f} %"


@register.filter
def dollars(value: Any) -> str:
    """Money: cents where they matter, two digits below ten cents."""
    amount = _number(value)
    if amount is None:
        return _DASH
    return f"${amount:,.2f}" if amount >= 0.1 or not amount else f"${amount:.2g}"


@register.filter
def seconds(value: Any) -> str:
    """A duration in its natural unit."""
    amount = _number(value)
    if amount is None:
        return _DASH
    if amount < 1:
        return f"{1000 * amount:.0f} ms"
    if amount < 60:
        return f"{amount:.1f} s"
    if amount < 3600:
        return f"{int(amount // 60)} min {int(amount % 60):02d} s"
    return f"{int(amount // 3600)} h {int(amount % 3600 // 60):02d} min"


@register.filter
def between(start: datetime | None, end: datetime | None) -> str:
    """The time from start to end, or to now."""
    if start is None:
        return _DASH
    return seconds(((end or timezone.now()) - start).total_seconds())


def ago_text(moment: datetime, now: datetime) -> str:
    """How long ago, roughly; static/slipway/times.js says the same in the browser."""
    passed = (now - moment).total_seconds()
    if passed < 5:
        return "just now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if passed >= size:
            return f"{int(passed // size)} {unit} ago"
    return "just now"


@register.filter
def ago(moment: datetime | None) -> SafeString | str:
    """A time element that reads "3 min ago" and carries the moment."""
    if not moment:
        return _DASH
    stamp = moment.astimezone(timezone.get_default_timezone())
    return format_html(
        '<time datetime="{}" title="{}" data-ago>{}</time>',
        stamp.isoformat(timespec="seconds"),
        stamp.strftime("%Y-%m-%d %H:%M:%S UTC"),
        ago_text(moment, timezone.now()),
    )


def until_text(moment: datetime, now: datetime) -> str:
    """How long until then; static/slipway/times.js says the same in the browser."""
    left = int((moment - now).total_seconds())
    if left <= 0:
        return "now"
    days, hours, minutes, rest = left // 86400, left // 3600 % 24, left // 60 % 60, left % 60
    if days:
        return f"in {days} d {hours} h"
    if hours:
        return f"in {hours} h {minutes:02d} min"
    return f"in {minutes} min {rest:02d} s" if minutes else f"in {rest} s"


@register.filter
def until(moment: datetime | None) -> SafeString | str:
    """A time element that counts down to the moment."""
    if not moment:
        return _DASH
    stamp = moment.astimezone(timezone.get_default_timezone())
    return format_html(
        '<time datetime="{}" title="{}" data-until>{}</time>',
        stamp.isoformat(timespec="seconds"),
        stamp.strftime("%Y-%m-%d %H:%M:%S UTC"),
        until_text(moment, timezone.now()),
    )


@register.filter
def state(value: str) -> SafeString:
    """A state as glyph, word and tint."""
    look = look_of(value)
    return format_html(
        '<span class="state {}"><span class="glyph" aria-hidden="true">{}</span>{}</span>',
        look.tone.value,
        look.glyph,
        value.replace("_", " ") or _DASH,
    )


@register.filter
def visible(text: str | None) -> SafeString:
    """Foreign text: escaped, with hidden characters made visible."""
    return visible_html(text or "")


@register.filter
def visible_attribute(text: str | None) -> str:
    """Foreign text for an attribute: hidden characters made visible; the template escapes."""
    return visible_text(text or "")


@register.filter
def sentence(event: Any) -> SafeString:
    """What an event says happened."""
    return visible_html(event_sentence(event.type, event.data))


@register.filter
def tone(event: Any) -> str:
    """The tone of an event."""
    return event_tone(event.type, event.data).value


@register.filter
def kind_label(event_type: str) -> str:
    """The kind of an event as it is written in filters."""
    return EventType(event_type).value if event_type in EventType.values else event_type


@register.filter
def short(value: Any, length: int = 8) -> str:
    """The head of an id or hash."""
    return str(value)[:length] if value else _DASH


@register.filter
def tail(value: Any, length: int = 8) -> str:
    """The end of an id: the part of a time-ordered id in which neighbours differ."""
    return f"…{str(value)[-length:]}" if value else _DASH


@register.filter
def version(value: Any) -> str:
    """A policy version within its lineage: epoch and number."""
    return f"{value.epoch}-{value.number}" if value else _DASH


@register.filter
def named(value: Any) -> str:
    """A policy version where those of several lineages meet: the end of its lineage's id, epoch and number."""
    return version_name(value) if value else _DASH


@register.filter
def pretty_json(value: Any) -> str:
    """JSON for people. The template escapes it."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True, default=str)


@register.filter
def glimpse(value: Any) -> str:
    """A line of what a JSON object holds, for tables; the page of the thing itself shows all of it."""
    fields = value.items() if isinstance(value, dict) else [("", value)]
    parts = [f"{key}: {_one_line(held)}".removeprefix(": ") for key, held in fields]
    return Truncator(" · ".join(parts[:_GLIMPSE_FIELDS])).chars(_GLIMPSE_CHARS)


def _one_line(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{len(value)} of them"
    return Truncator(" ".join(str(value).split())).chars(_GLIMPSE_CHARS // 2)


@register.filter
def get(mapping: dict[Any, Any], key: Any) -> Any:
    """A value of a mapping by a key that is not a literal."""
    return mapping.get(key)


@register.filter
def spark(values: Sequence[float]) -> SafeString | str:
    """A small line of the values, with its last point and a text that says first and last."""
    if len(values) < 2:
        return figure(values[0]) if values else _DASH
    low, high = min(values), max(values)
    height = (high - low) or 1.0
    last = len(values) - 1
    points = [(100 * index / last, 19 - 18 * (value - low) / height) for index, value in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return format_html(
        '<svg class="spark" viewBox="-1 0 104 20" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<polyline points="{}"/></svg>',
        f"from {values[0]:.3g} to {values[-1]:.3g} over {len(values)} steps",
        line,
    )


@register.simple_tag(takes_context=True)
def query_with(context: dict[str, Any], **changes: Any) -> str:
    """The present query string with some parameters changed; None or an empty value removes one."""
    query = context["request"].GET.copy()
    for key, value in changes.items():
        if value in (None, ""):
            query.pop(key, None)
        else:
            query[key] = str(value)
    return str(query.urlencode())


@register.filter
def split_words(text: str) -> list[str]:
    """Words of a literal, to loop over."""
    return text.split()


@register.filter
def as_json(value: Any) -> str:
    """JSON for a data attribute. The template escapes it."""
    return json.dumps(value)


@register.filter
def times_smaller(value: Any) -> str:
    """How many times a version's delta is smaller than its full weights."""
    if not value or not value.delta_bytes or not value.full_bytes:
        return _DASH
    return f"{value.full_bytes / value.delta_bytes:,.0f} ×"


@register.filter
def changed_share(value: Any) -> str:
    """Which share of its elements a version changed."""
    if not value or value.changed_elements is None or not value.elements:
        return _DASH
    return percent(value.changed_elements / value.elements, 2)


@register.filter
def modulo(value: int, divisor: int) -> int:
    """The remainder: versions beyond the fourth take the first's underline again, and are named where they begin."""
    return value % divisor


@register.filter
def words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


@register.filter
def topic_name(topic: str) -> str:
    """A topic's kind and the end of its id."""
    kind, _, key = topic.partition(":")
    return f"{kind} {tail(key)}" if key else topic
