"""Edit persistence: how much of what a model changed in a text is still there some time later."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain, pairwise
from typing import Final

from rl_core.errors import SignalError

MAX_CHARACTERS: Final = 200_000

_TOKEN = re.compile(r"\w+|[^\w\s]")
_LINE_START = ""
_Pair = tuple[str, str]


def edit_persistence(before: str, after: str, now: str) -> float | None:
    """The share, in [0, 1], of the edit `before` → `after` that `now` still has; None when nothing was changed.

    The unit is a token of a line (a word or a mark; white space counts for nothing) with the token before it. Each one
    that the edit added counts while it is there; each one that it took away counts while it stays away. Code that was
    moved is still there. Pairs are counted, not aligned: unlike `difflib`, whose worst case is cubic, the time is
    linear in the texts, which anybody may send.

    Raises: SignalError over `MAX_CHARACTERS`.
    """
    old, new, late = _pairs(before), _pairs(after), _pairs(now)
    added, taken = new - old, old - new
    total = added.total() + taken.total()
    if total == 0:
        return None
    present = late - (old & new)
    return ((added & present).total() + taken.total() - (taken & present).total()) / total


def _pairs(text: str) -> Counter[_Pair]:
    if len(text) > MAX_CHARACTERS:
        raise SignalError(f"a text has {len(text)} characters; at most {MAX_CHARACTERS} are compared")
    lines = (_TOKEN.findall(line) for line in text.splitlines())
    return Counter(chain.from_iterable(pairwise([_LINE_START, *tokens]) for tokens in lines))
