"""What others wrote is shown and cannot act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.plain import is_hidden, visible, visible_text, without_hidden


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("<b>&\"'", "&lt;b&gt;&amp;&quot;&#x27;"),
        ("a\x1b[31m", 'a<span class="ctl">ESC</span>[31m'),
        ("exe\u202egnp", 'exe<span class="ctl">U+202E</span>gnp'),
        ("a\u200bb", 'a<span class="ctl">U+200B</span>b'),
        ("line\n\ttab", "line\n\ttab"),
        ("👩\u200d🚀 naïve ≤", "👩\u200d🚀 naïve ≤"),
    ],
)
def test_hidden_characters_become_marks(text: str, html: str) -> None:
    assert visible(text) == html


@given(st.text())
def test_nothing_hidden_and_no_markup_survives(text: str) -> None:
    html = str(visible(text))
    bare = html.replace('<span class="ctl">', "").replace("</span>", "")
    assert "<" not in bare
    assert not any(is_hidden(character) for character in html)
    assert not any(is_hidden(character) for character in visible_text(text) + without_hidden(text))
