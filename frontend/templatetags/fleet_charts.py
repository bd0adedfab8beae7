"""Chains of versions drawn on the server: deltas, skip-deltas, snapshots, who holds what. The same is in a table."""

from __future__ import annotations

from dataclasses import dataclass

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.selectors.pages_chain import Chain, Column, Holders, Published
from controlplane.states import PublicationKind
from frontend.templatetags.slipway import quantity_bytes, version

register = template.Library()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where columns stand."""

    step: int

    def x(self, column: int) -> int:
        return LEFT + self.step * column


LEFT, RIGHT = 24, 30
WIDE, NARROW, MANY = 60, 34, 14  # between two versions, by how many there are
ROW, ARCS, AXIS = 22, 64, 24


@register.filter
def chain(drawn: Chain) -> SafeString:
    """The chain from its oldest version shown, on the left, to its newest; a line for each cluster below it."""
    names = max((len(holders.cluster) for holders in drawn.holders), default=0)
    place = _Place(WIDE if len(drawn.columns) < MANY else NARROW)
    width = place.x(max(1, len(drawn.columns) - 1)) + RIGHT + 7 * names
    height = ARCS + AXIS + ROW * len(drawn.holders) + 6
    return format_html(
        '<svg class="chain" width="{}" height="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}{}</svg>',
        width,
        height,
        width,
        height,
        _said(drawn),
        _guides(drawn, place, height),
        _edges(drawn, place),
        _versions(drawn, place),
        format_html_join("", "{}", ((_holders(row, n, drawn, place),) for n, row in enumerate(drawn.holders))),
    )


def _guides(drawn: Chain, place: _Place, height: int) -> SafeString:
    lines = ((place.x(column), ARCS, height - 6) for column in range(len(drawn.columns)))
    return format_html_join("", '<path class="guide" d="M{} {}V{}"/>', lines)


def _edges(drawn: Chain, place: _Place) -> SafeString:
    edges = [
        (number, one)
        for number, column in enumerate(drawn.columns)
        for one in column.deltas
        if one.base is not None or one.publication.base_version_id is not None
    ]
    return format_html_join("", "{}", ((_edge(number, one, place),) for number, one in edges))


def _edge(number: int, one: Published, place: _Place) -> SafeString:
    """A line to the neighbour, an arc over versions that are skipped; from the left edge where the base is older."""
    end, start = place.x(number), LEFT - 14 if one.base is None else place.x(one.base)
    skips = one.publication.kind == PublicationKind.SKIP or number - (one.base if one.base is not None else -1) > 1
    rise = min(ARCS - 12, 14 + 5 * (number - (one.base or 0)))
    path = (
        f"M{start} {ARCS}Q{(start + end) / 2:.0f} {ARCS - 2 * rise} {end} {ARCS}" if skips else f"M{start} {ARCS}H{end}"
    )
    return format_html(
        '<path class="{}" d="{}"><title>{}</title></path>',
        "skip" if skips else "delta",
        path,
        f"{one.publication.kind} {version(one.publication.base_version)} → {version(one.publication.version)}, "
        f"{one.publication.format}, {quantity_bytes(one.publication.bytes)}",
    )


def _versions(drawn: Chain, place: _Place) -> SafeString:
    every = 1 + len(drawn.columns) // 13
    last = len(drawn.columns) - 1
    return format_html_join(
        "",
        "{}",
        (
            (_version(column, place.x(number), labelled=(last - number) % every == 0),)
            for number, column in enumerate(drawn.columns)
        ),
    )


def _version(column: Column, x: int, *, labelled: bool) -> SafeString:
    mark = (
        format_html('<rect class="snapshot" x="{}" y="{}" width="12" height="12"/>', x - 6, ARCS - 6)
        if column.snapshot
        else format_html('<circle class="version" cx="{}" cy="{}" r="4.5"/>', x, ARCS)
    )
    name = version(column.version)
    text = format_html('<text class="tick" x="{}" y="{}">{}</text>', x, ARCS + 18, name) if labelled else ""
    said = (
        f"version {name}{', snapshot ' + quantity_bytes(column.snapshot.publication.bytes) if column.snapshot else ''}"
    )
    return format_html("<g><title>{}</title>{}{}</g>", said, mark, text)


def _holders(row: Holders, number: int, drawn: Chain, place: _Place) -> SafeString:
    y = ARCS + AXIS + ROW * number + ROW // 2
    marks = []
    for kind, columns in (("want", row.want), ("hold", row.hold)):
        for column, names in sorted(columns.items()):
            name = version(drawn.columns[column].version)
            verb = "should hold" if kind == "want" else "holds" if len(names) == 1 else "hold"
            marks.append((kind, place.x(column), y, 9 if kind == "want" else 6.5, f"{', '.join(names)} {verb} {name}"))
    counts = [(place.x(column), y + 3.5, len(names)) for column, names in row.hold.items() if len(names) > 1]
    return format_html(
        '<text class="row" x="{}" y="{}">{}</text>{}{}',
        place.x(len(drawn.columns) - 1) + 18,
        y + 4,
        row.cluster,
        format_html_join("", '<circle class="{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>', marks),
        format_html_join("", '<text class="count" x="{}" y="{}">{}</text>', counts),
    )


def _said(drawn: Chain) -> str:
    """The drawing in a sentence; the table below it has every line."""
    if not drawn.columns:
        return "no version yet"
    kinds = [one.publication.kind for _, one in drawn.publications]
    counts = ", ".join(f"{kinds.count(kind)} {kind.label.lower()}" for kind in PublicationKind)
    first, last = version(drawn.columns[0].version), version(drawn.columns[-1].version)
    where = "; ".join(
        f"{row.cluster} holds {', '.join(version(drawn.columns[column].version) for column in sorted(row.hold))}"
        for row in drawn.holders
        if row.hold
    )
    return f"versions {first} to {last}: {counts}. {where}"
