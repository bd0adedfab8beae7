"""Small charts drawn on the server: intervals beside a margin, and distributions. The same stands in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.selectors.pages_releases import EffectRow, Finding
from frontend.looks import Look, Tone
from frontend.templatetags.slipway import figure

register = template.Library()

WIDTH, HEIGHT = 240, 22
MIDDLE = HEIGHT // 2
REACH = 3.2  # margins to either side
EDGE = 4

FINDING_LOOKS: dict[Finding, Look] = {
    Finding.BETTER: Look("▲", Tone.OK),
    Finding.NO_WORSE: Look("✓", Tone.OK),
    Finding.OPEN: Look("?", Tone.WARN),
    Finding.WORSE: Look("✕", Tone.BAD),
    Finding.NO_DATA: Look("○", Tone.IDLE),
}


@register.filter
def finding(row: EffectRow) -> SafeString:
    """What the interval says, as glyph, word and tint."""
    look = FINDING_LOOKS[row.finding]
    return format_html(
        '<span class="state {}"><span class="glyph" aria-hidden="true">{}</span>{}</span>',
        look.tone.value,
        look.glyph,
        row.finding.value,
    )


@register.filter
def interval(row: Any, digits: int = 3) -> str:
    """The difference with its interval, in the metric's own unit."""
    if row.difference is None:
        return "—"
    text = signed(row.difference, digits)
    bounds = "no interval yet" if row.low is None else f"{signed(row.low, digits)}, {signed(row.high, digits)}"
    return f"{text} [{bounds}]"


@register.filter
def signed(value: float | None, digits: int = 3) -> str:
    """A difference, with its sign always."""
    if value is None:
        return "—"
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{figure(abs(value), digits)}"


@register.filter
def forest(row: EffectRow) -> SafeString:
    """The interval on a scale of margins: 0 in the middle, better to the right, one margin to the left dashed."""
    return _plot(row, row.margin, row.sign, both=False)


@register.filter
def forest_both(row: Any) -> SafeString:
    """The same for what must not move either way: a margin on both sides."""
    return _plot(row, row.threshold, 1, both=True)


def _plot(row: Any, margin: float, sign: int, *, both: bool) -> SafeString:
    known = [abs(value) for value in (row.difference, row.low, row.high) if value is not None]
    unit = margin or max(known, default=0.0) / 2 or 1.0

    def place(value: float) -> float:
        x = WIDTH / 2 + (WIDTH / 2 - EDGE) * sign * value / unit / REACH
        return max(EDGE, min(WIDTH - EDGE, x))

    lines = [("zero", 0.0)]
    if margin:
        lines += [("margin", -sign * margin), *([("margin", sign * margin)] if both else [])]
    marks = format_html_join(
        "", '<path class="{}" d="{}"/>', ((name, f"M{place(value):.1f} 1V{HEIGHT - 1}") for name, value in lines)
    )
    return format_html(
        '<svg class="forest" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>',
        WIDTH,
        HEIGHT,
        f"{interval(row)}, margin {figure(margin)}",
        marks,
        _whiskers(row, place),
        _point(row, place),
    )


def _whiskers(row: Any, place: Any) -> SafeString:
    if row.low is None or row.high is None:
        return SafeString("")
    left, right = sorted((place(row.low), place(row.high)))
    ends = format_html_join(
        "",
        '<path class="end" d="{}"/>',
        ((_end(x, towards),) for x, towards in ((left, -1), (right, 1))),
    )
    path = f"M{left:.1f} {MIDDLE}H{right:.1f}"
    return format_html('<path class="range" d="{}"/>{}', path, ends)


def _end(x: float, towards: int) -> str:
    """A bar at the interval's end; an arrow where it goes on beyond the plot."""
    if EDGE < x < WIDTH - EDGE:
        return f"M{x:.1f} {MIDDLE - 4}v8"
    return f"M{x - 4 * towards:.1f} {MIDDLE - 4}L{x:.1f} {MIDDLE}L{x - 4 * towards:.1f} {MIDDLE + 4}"


def _point(row: Any, place: Any) -> SafeString:
    if row.difference is None:
        return SafeString("")
    return format_html('<circle cx="{}" cy="{}" r="3.5"/>', f"{place(row.difference):.1f}", MIDDLE)


@register.filter
def histogram(bins: Sequence[Any]) -> SafeString:
    """Two distributions over [-1, 1]: the one before hollow, the one after filled."""
    tallest = max((max(one.before, one.after) for one in bins), default=0) or 1
    width, height = 400, 110
    step = width / max(1, len(bins))
    bars = []
    for index, one in enumerate(bins):
        for name, count, shift in (("before", one.before, 0.1), ("after", one.after, 0.5)):
            tall = (height - 4) * count / tallest
            bars.append(
                (name, f"{step * (index + shift):.1f}", f"{height - tall:.1f}", f"{step * 0.4:.1f}", f"{tall:.1f}")
            )
    drawn = format_html_join("", '<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>', bars)
    return format_html(
        '<svg class="histogram" viewBox="0 -2 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}'
        '<line class="zero" x1="0" y1="{}" x2="{}" y2="{}"/></svg>',
        width,
        height + 4,
        "Rewards from −1 to 1, before and after: the counts are in the table below",
        drawn,
        height,
        width,
        height,
    )


@register.filter
def tenths(counts: Sequence[int]) -> SafeString:
    """How many have a value in each tenth of [0, 1], as bars: the counts are in the title of each."""
    width, height = 400, 110
    tallest, step = max(counts, default=0) or 1, width / max(1, len(counts))
    bars = [
        (
            f"{step * (index + 0.1):.1f}",
            f"{height - (height - 4) * count / tallest:.1f}",
            f"{step * 0.8:.1f}",
            f"{(height - 4) * count / tallest:.1f}",
            f"{index / len(counts):.1f} to {(index + 1) / len(counts):.1f}: {count}",
        )
        for index, count in enumerate(counts)
    ]
    drawn = format_html_join(
        "", '<rect class="after" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>', bars
    )
    return format_html(
        '<svg class="histogram" viewBox="0 -2 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}'
        '<line class="zero" x1="0" y1="{}" x2="{}" y2="{}"/></svg>',
        width,
        height + 4,
        "Tasks by mean reward from 0 to 1: " + ", ".join(map(str, counts)),
        drawn,
        height,
        width,
        height,
    )


@register.filter
def at_position(exposures: Sequence[Any], position: int) -> Any:
    """The exposure of one step; None before the first look at it."""
    return next((one for one in exposures if one.position == position), None)
