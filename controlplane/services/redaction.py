"""Redaction: what a lane's expressions match never reaches storage.

Expressions are RE2's: matching takes time linear in the text whatever the expression, so that none can stall a process,
and its memory is bounded. What RE2 does not know (backreferences, lookaround) is refused when it is configured. Where
redacting fails, or takes longer than its bound, no content is kept at all.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from typing import Any, Final

import re2

from controlplane.errors import Invalid

MAX_REDACTIONS: Final = 50
MAX_EXPRESSION_CHARACTERS: Final = 1000
MAX_TEXT_CHARACTERS: Final = 2_000_000
MAX_SECONDS: Final = 2.0

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_Expressions = tuple[tuple[str, str], ...]


class RedactionFailed(Exception):
    """A text could not be redacted within the bounds."""


def redactions_check(redactions: Mapping[str, str]) -> None:
    """Raises: Invalid, naming the expression, for one that does not compile or matches nothing at all."""
    if len(redactions) > MAX_REDACTIONS:
        raise Invalid(f"a lane has at most {MAX_REDACTIONS} redactions, not {len(redactions)}", "redactions")
    for name, expression in redactions.items():
        if not _NAME.fullmatch(name):
            raise Invalid(f"{name!r}: a redaction's name has 1 to 32 of a-z, 0-9 and _", "redactions")
        try:
            compiled = _compile(expression)
        except (RedactionFailed, TypeError) as error:
            raise Invalid(f"redaction {name}: {error}", f"redactions.{name}") from error
        if compiled.search("") is not None:
            raise Invalid(f"redaction {name} matches the empty text; make it match something", f"redactions.{name}")


class Redactor:
    """Replaces what the expressions match by their names: `[email]`. Raises: RedactionFailed when one is unusable."""

    def __init__(self, redactions: Mapping[str, str]) -> None:
        self.count = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self._expressions = _compiled(tuple(redactions.items()))

    def text(self, text: str) -> str:
        """The text without what must not be kept. Raises: RedactionFailed."""
        if len(text) > MAX_TEXT_CHARACTERS:
            raise RedactionFailed(f"a text of {len(text)} characters is over the bound of {MAX_TEXT_CHARACTERS}")
        for name, expression in self._expressions:
            if time.monotonic() > self._deadline:
                raise RedactionFailed(f"redacting took longer than {MAX_SECONDS} s")
            try:
                text, found = expression.subn(functools.partial(_named, name), text)
            except UnicodeError as error:
                raise RedactionFailed(f"the text is no Unicode: {error}") from error
            self.count += found
        return text


def _named(name: str, _: object) -> str:
    """A function, because a string would be read as a template with group references."""
    return f"[{name}]"


@functools.lru_cache(maxsize=64)
def _compiled(redactions: _Expressions) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _compile(expression)) for name, expression in redactions)


def _compile(expression: str) -> Any:
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise RedactionFailed(f"an expression has at most {MAX_EXPRESSION_CHARACTERS} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(expression, options=options)
    except (re2.error, UnicodeError) as error:
        detail = error.args[0] if isinstance(error, re2.error) and error.args else str(error)
        text = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
        raise RedactionFailed(f"the expression does not compile: {text}") from error
