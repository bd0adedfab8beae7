"""How a policy writes a tool call: arguments between two tags."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ToolSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and the tags around its arguments. `complaint` is what a malformed call is answered with."""

    name: str
    open: str
    close: str
    complaint: str


class NoCall(StrEnum):
    """Why a turn holds no call that can be made."""

    ABSENT = "absent"  # the policy called no tool: it answered
    MALFORMED = "malformed"  # it tried to, and wrote the tags wrong


class Call(msgspec.Struct, frozen=True):
    """A call that can be made."""

    arguments: str


def parse_call(syntax: ToolSyntax, text: str) -> Call | NoCall:
    """The turn's call. Generation stops at the closing tag, so there is at most one."""
    before, opened, rest = text.partition(syntax.open)
    if not opened:
        return NoCall.MALFORMED if syntax.close in text else NoCall.ABSENT
    arguments, closed, after = rest.partition(syntax.close)
    if not closed or syntax.open in arguments or syntax.close in before or syntax.open in after:
        return NoCall.MALFORMED
    return Call(arguments.strip("\n") if "\n" in arguments else arguments.strip())
