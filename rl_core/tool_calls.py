"""Tool calls as text: how tools are shown to a model, and how its calls are found in what it says.

The form is the one that open models were trained on most (Hermes, Qwen, SmolLM2): a JSON object with `name` and
`arguments`, or a list of such objects, between `<tool_call>` and `</tool_call>`. A call that does not read stays text:
it is counted, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rl_core.types import ToolCall

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

# What may still become a tag, with the white space before it: held back until the next piece decides.
_UNDECIDED: Final = re.compile(r"\s*(?:<(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?)?)?)?)?)?\Z")

UNREADABLE: Final = object()

KnownTools = Mapping[str, frozenset[str]]


def known_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Names of tools in OpenAI's shape, each with the arguments that it requires."""
    known = {}
    for tool in tools:
        required = (tool["function"].get("parameters") or {}).get("required")
        names = required if isinstance(required, list) else []
        known[tool["function"]["name"]] = frozenset(name for name in names if isinstance(name, str))
    return known


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in OpenAI's shape as a passage of a system message, for models whose template knows no tools."""
    listed = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in tools)
    return (
        "You may call these functions. Each line is one, as JSON with the schema of its parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write a JSON object with its name and arguments between the tags, and nothing after it:\n"
        f'{OPEN}\n{{"name": "function", "arguments": {{"parameter": "value"}}}}\n{CLOSE}'
    )


def call_text(name: str, arguments: str) -> str:
    """A call as a model writes it."""
    return f'{OPEN}\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments or "{}"}}}\n{CLOSE}'


def call_opening(name: str = "") -> str:
    """How a call begins, of the tool of that name or of any: what a model is made to go on from."""
    return f'{OPEN}\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": ' if name else f'{OPEN}\n{{"name": "'


class CallFinder:
    """Splits one answer, as it comes, into text to show and calls to make.

    `attempts` has every call that was tried, malformed ones too (`ok` false, the raw text as arguments). A call that
    leaves out required arguments is given on, because the product tells the model so, but is not `ok`.
    """

    def __init__(self, known: KnownTools) -> None:
        self.attempts: list[ToolCall] = []
        self._known = known
        self._buffer = ""
        self._space = ""
        self._inside = False

    def push(self, piece: str) -> list[str | ToolCall]:
        """What this piece of the answer makes certain."""
        self._buffer += piece
        found: list[str | ToolCall] = []
        while True:
            before, tag, after = self._buffer.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            found += self._call(before, CLOSE) if self._inside else self._text(before)
            self._buffer, self._inside = after, not self._inside
        if not self._inside:
            held = _UNDECIDED.search(self._buffer)
            cut = held.start() if held else len(self._buffer)
            text, self._buffer = self._buffer[:cut], self._buffer[cut:]
            found += self._text(text)
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest. A call that was never closed counts if it reads."""
        rest, self._buffer = self._buffer, ""
        if self._inside:
            self._inside = False
            return self._call(rest, "")
        if not rest.strip() and self.attempts and not self._space:
            return []
        return [self._space + rest] if self._space + rest else []

    def _text(self, text: str) -> list[str | ToolCall]:
        """Text before a call or before what may become one. White space before a call is not shown."""
        shown = text.rstrip()
        space, self._space = self._space, text[len(shown) :]
        if not shown:
            self._space = space + self._space
            return []
        return [space + shown]

    def _call(self, body: str, closing: str) -> list[str | ToolCall]:
        calls = parse_calls(body, self._known)
        if calls:
            self._space = ""
            self.attempts += calls
            return list(calls)
        raw = f"{OPEN}{body}{closing}"
        space, self._space = self._space, ""
        self.attempts.append(ToolCall(tool="", arguments=raw, result="", ok=False, turn=0))
        return [space + raw]


def call_bodies(text: str) -> list[str]:
    """What stands between the tags of a whole answer, in order; a call that was never closed goes to the end."""
    bodies = []
    while OPEN in text:
        body, _, text = text.partition(OPEN)[2].partition(CLOSE)
        bodies.append(body)
    return bodies


def read_json(text: str) -> Any:
    """The value of a JSON text, `UNREADABLE` where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return UNREADABLE


def parse_calls(body: str, known: KnownTools) -> list[ToolCall]:
    """The calls between two tags; empty when the text is none, names an unknown tool or has no object of arguments."""
    value = read_json(body)
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in known:
            return []
        arguments = _object(item.get("arguments", {}))
        if arguments is None:
            return []
        complete = known[item["name"]] <= arguments.keys()
        text = msgspec.json.encode(arguments).decode()
        calls.append(ToolCall(tool=item["name"], arguments=text, result="", ok=complete, turn=0))
    return calls


def _object(value: Any) -> dict[str, Any] | None:
    """Arguments as an object; some models write them as a string of JSON."""
    if isinstance(value, str):
        value = read_json(value)
    return value if isinstance(value, dict) else None
