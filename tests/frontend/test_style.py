"""The style sheets keep their promises: readable contrast, one dark theme in both places, nothing fetched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[2] / "frontend" / "static" / "slipway"
TOKENS = (STATIC / "tokens.css").read_text()


def block(head: str) -> dict[str, str]:
    """The custom properties of the block that begins with `head`."""
    start = TOKENS.index(head) + len(head)
    return dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", TOKENS[start : TOKENS.index("}", start)]))


LIGHT = block(":root {")
DARK = block(':root[data-theme="dark"] {')


def luminance(colour: str) -> float:
    """Relative luminance. Source: WCAG 2.2."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


PAIRS = [
    *((ink, paper) for ink in ("text", "muted", "faint", "accent") for paper in ("bg", "panel", "panel-2", "raised")),
    *((tone, f"{tone}-soft") for tone in ("ok", "warn", "bad", "info")),
    *((tone, "panel") for tone in ("ok", "warn", "bad", "info")),
    ("muted", "idle-soft"),
    ("text", "accent-soft"),
    ("accent-ink", "accent"),
    *(("heat-ink", f"heat-{shade}") for shade in range(5)),
]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("ink", "paper"), PAIRS)
def test_text_is_readable(theme: dict[str, str], ink: str, paper: str) -> None:
    assert contrast(theme[ink], theme[paper]) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_of_charts_stand_out(theme: dict[str, str]) -> None:
    assert all(contrast(theme[f"chart-{number}"], theme["panel"]) >= 3 for number in range(1, 7))


def test_the_dark_theme_is_the_same_in_both_places() -> None:
    assert block(':root:not([data-theme="light"]) {') == DARK
    assert set(DARK) == set(LIGHT)


def test_nothing_is_fetched_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in re.sub(r"//.*", "", text) if path.suffix == ".js" else "://" not in text, path.name
        assert "eval(" not in text, path.name
        assert "new Function" not in text, path.name


def test_every_module_that_is_imported_exists() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name} imports {name}"
