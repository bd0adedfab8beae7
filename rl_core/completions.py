"""Reading what an OpenAI endpoint answered to a chat completion: for judges, whose answers are whole or nothing."""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def said_in(answer: bytes) -> str:
    """What the first choice says. Raises: ValueError for another answer, or one that did not come to its own end."""
    try:
        choices = msgspec.json.decode(answer, type=_Completion).choices
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the judge's answer is no chat completion: {error}") from error
    if not choices:
        raise ValueError("the judge's answer is no chat completion: it has no choices")
    said = choices[0].message.content or ""
    if choices[0].finish_reason not in (None, "stop"):
        raise ValueError(f"the judge did not end its answer: {said[-100:]!r}")
    return said
