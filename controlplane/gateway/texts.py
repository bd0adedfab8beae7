"""From sampled tokens to what a client sees: text as it becomes certain, and tool calls whole."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.chat import ChatTokenizer
from rl_core.engines.streams import TextStream
from rl_core.tool_calls import CallFinder, KnownTools
from rl_core.types import ToolCall

Part = str | ToolCall


class AnswerText:
    """The text of one choice. `known` None: no tools were offered, and nothing is looked for.

    `opening` is what the answer was made to begin with: part of what the client sees, though not sampled.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, stops: tuple[str, ...], known: KnownTools | None, opening: str
    ) -> None:
        self._stream = TextStream(tokenizer, stops)
        self._finder = None if known is None else CallFinder(known)
        self._opening = opening
        self.said: list[Part] = []

    @property
    def given(self) -> int:
        """How many calls the client was given."""
        return sum(isinstance(part, ToolCall) for part in self.said)

    @property
    def attempts(self) -> Sequence[ToolCall]:
        """Every tool call that was tried, malformed ones too. Complete after `finish`."""
        return self._finder.attempts if self._finder else ()

    def push(self, token: int) -> list[Part]:
        """What this token makes certain."""
        return self._split(self._stream.push(token))

    def finish(self, text: str) -> list[Part]:
        """The rest, given the whole text that was sampled."""
        parts = self._split(self._stream.finish(text))
        rest = self._finder.finish() if self._finder else []
        self.said += rest
        return [*parts, *rest]

    def _split(self, piece: str) -> list[Part]:
        piece, self._opening = self._opening + piece, ""
        if not piece:
            return []
        parts: list[Part] = [piece] if self._finder is None else self._finder.push(piece)
        self.said += parts
        return parts
