"""How one answer behaves: the counts that monitors compare between two versions.

Cheap, deterministic and content-free, so that it is kept of every answer whatever its user allowed. What a single count
says is weak; its rate over many answers is what a monitor watches. Refusals and questions are recognised in English.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rl_core.types import ToolCall

_HEAD_CHARACTERS: Final = 240
_TAIL_CHARACTERS: Final = 400

_REFUSAL: Final = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|afraid)[,.]? (?:but )?(?:i |that )?(?:can(?:no|')t|am (?:un|not )able|won't|isn't)"
    r"|i(?:'m| am) (?:unable|not able|not allowed|not permitted) to"
    r"|i (?:can(?:no|')t|can not|won't|will not|must decline|decline|refuse)(?: to)? "
    r"(?:help|assist|do|provide|answer|comply|support|fulfil|fulfill|create|write|generate|share|discuss|give|continue)"
    r"|as an ai(?: language)? model,? i)",
    re.IGNORECASE,
)
_CLOSING: Final = " \t\r\n\"'”’)]*_"
_EDITING: Final = re.compile(
    r"(?:^|[_.\-])(?:edit|write|patch|apply|replace|insert|delete|remove|create|rename|move)(?:$|[_.\-])"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DIFF: Final = re.compile(r"^(?:--- \S.*\n\+\+\+ \S|\*\*\* Begin Patch)", re.MULTILINE)


def behaviour_of(text: str, tool_calls: Sequence[ToolCall] = (), *, tokens: int = 0) -> dict[str, int | bool]:
    """Counts of one answer. `tool_calls` are all that it tried; those that are not `ok` are invalid.

    refusal: it says near its beginning that it will not or cannot. question: it ends by asking the user something and
    calls no tool. edits: calls of tools that change files by their name, and diffs in the text.
    """
    straight = text.replace("’", "'")
    ending = straight[-_TAIL_CHARACTERS:].rstrip(_CLOSING)
    edits = sum(call.ok and edits_files(call.tool) for call in tool_calls) + len(_DIFF.findall(text))
    return {
        "tokens": tokens,
        "refusal": _REFUSAL.search(straight[:_HEAD_CHARACTERS]) is not None,
        "question": ending.endswith("?") and not tool_calls,
        "tool_calls": len(tool_calls),
        "invalid_tool_calls": sum(not call.ok for call in tool_calls),
        "edits": edits,
    }


def edits_files(tool: str) -> bool:
    """Whether a tool changes files, by the words of its name: `edit_file`, `applyPatch`, `fs.write`."""
    return _EDITING.search(_CAMEL.sub("_", tool).lower()) is not None
