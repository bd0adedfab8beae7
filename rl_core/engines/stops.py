"""Stop strings, found as tokens arrive, on a table of token strings instead of by decoding everything each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopMatcher:
    """Follows one completion and says when a stop string stands in it."""

    def __init__(
        self, stops: tuple[str, ...], *, token_strings: Sequence[str], decode: Callable[[list[int]], str]
    ) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._strings = token_strings
        self._decode = decode
        self._tail = ""
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        # A character outside ASCII may be spread over tokens that have no string of their own.
        self._exact = any(not stop.isascii() for stop in self._stops)
        self._recent: list[int] = []

    def push(self, token: int) -> bool:
        """Take the next token; True when it completes a stop string."""
        if not self._stops:
            return False
        if self._exact:
            # A character takes at most four tokens, so this many hold the longest stop and its beginning's remains.
            self._recent = [*self._recent, token][-4 * (self._keep + 2) :]
            text = self._decode(self._recent)
            return any(stop in text for stop in self._stops)
        text = self._tail + (self._strings[token] if token < len(self._strings) else "")
        if any(stop in text for stop in self._stops):
            return True
        self._tail = text[-self._keep :] if self._keep else ""
        return False


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string in it: what OpenAI's API returns."""
    places = [place for place in (text.find(stop) for stop in stops if stop) if place >= 0]
    return text[: min(places)] if places else text
