"""Text that a model or a user wrote, made safe to look at: what cannot be seen is shown by name.

Escaping is the template's work as everywhere; this is about characters that change how others appear: terminal
escapes, bidirectional overrides (Trojan Source, Boucher and Anderson 2021), invisible and private ones.
"""

from __future__ import annotations

import unicodedata

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

_KEPT = frozenset("\n\t")
_NAMES = {"\x1b": "ESC", "\r": "CR", "\x07": "BEL", "\x08": "BS", "\x7f": "DEL", "\ufeff": "BOM"}
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp"})
# Joiners that scripts and emoji need.
_JOINERS = frozenset("\u200c\u200d\ufe0f")


def is_hidden(character: str) -> bool:
    """Whether the character cannot be seen, or changes how others are seen."""
    if character in _KEPT or character in _JOINERS:
        return False
    return unicodedata.category(character) in _HIDDEN


def name_of(character: str) -> str:
    """A short name: ESC, RLO, U+202E."""
    return _NAMES.get(character, f"U+{ord(character):04X}")


def visible(text: str) -> SafeString:
    """HTML of the text, escaped, with hidden characters as labelled marks."""
    parts: list[str] = []
    plain: list[str] = []
    for character in text:
        if is_hidden(character):
            parts.append(escape("".join(plain)))
            plain = []
            parts.append(f'<span class="ctl">{escape(name_of(character))}</span>')
        else:
            plain.append(character)
    parts.append(escape("".join(plain)))
    return mark_safe("".join(parts))  # noqa: S308  every part was escaped above


def visible_text(text: str) -> str:
    """The same as plain text, for attributes and titles: hidden characters as ⟦NAME⟧."""
    return "".join(f"⟦{name_of(character)}⟧" if is_hidden(character) else character for character in text)


def without_hidden(text: str) -> str:
    """The text without hidden characters, to go on typing from."""
    return "".join(character for character in text if not is_hidden(character))
