"""Tools, and how a policy writes calls of them.

Two syntaxes. Small models are given a pair of tags for each tool, with its one argument between them. Models that were
trained on tools write JSON between `<tool_call>` and `</tool_call>`, one or several calls in a turn. Arguments are
checked against the tool's JSON schema either way; a call that cannot be made says why, in words for the policy.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from rl_core import tool_calls
from rl_core.environments.schemas import check_schema, misfit
from rl_core.errors import EnvironmentFault, SpecError

MAX_PROBLEM_CHARS: Final = 200
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of an environment. `parameters` is the JSON schema of its arguments, an object.

    Calls of `read_only` tools that stand side by side in one turn run at once; what they say of the state is ignored.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(f"tool name {self.name[:80]!r} must be 1 to 64 letters, digits, _ or -")
        if self.parameters.get("type") != "object":
            raise SpecError(f"tool {self.name}: parameters must be a JSON schema of type object")
        try:
            check_schema(self.parameters)
        except SpecError as error:
            raise SpecError(f"tool {self.name}: parameters are no JSON schema: {error}") from error

    def offered(self) -> dict[str, Any]:
        """The tool in OpenAI's shape, as templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Call(msgspec.Struct, frozen=True):
    """A call that can be made: its arguments fit the tool's schema."""

    tool: str
    arguments: dict[str, Any]


class BadCall(msgspec.Struct, frozen=True):
    """A call that cannot be made. `written` is what the policy wrote, `problem` what it is told."""

    tool: str
    written: str
    problem: str


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The tags around the one argument of a tool."""

    tool: str
    argument: str
    open: str
    close: str


class TagSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of tags for each tool; generation stops at a closing tag, so a turn has at most one call.

    `complaint` is what a malformed call is answered with.
    """

    tags: tuple[Tags, ...]
    complaint: str

    def stops(self, *, parallel: int) -> tuple[str, ...]:
        """Where generation ends a turn."""
        return tuple(tags.close for tags in self.tags)

    def find(self, tools: tuple[Tool, ...], text: str) -> list[Call | BadCall]:
        """The turn's call, if it has one."""
        placed = [(text.find(tags.open), tags) for tags in self.tags if tags.open in text]
        if not placed:
            closed = [tags for tags in self.tags if tags.close in text]
            return [self._malformed(closed[0], text)] if closed else []
        start, tags = min(placed, key=lambda pair: pair[0])
        before, rest = text[:start], text[start + len(tags.open) :]
        written, closed_by, after = rest.partition(tags.close)
        openings = [one.open for one in self.tags]
        if (
            not closed_by
            or any(opening in written or opening in after for opening in openings)
            or any(one.close in before or one.close in written for one in self.tags)
        ):
            return [self._malformed(tags, text)]
        argument = written.strip("\n") if "\n" in written else written.strip()
        return [check_arguments(tools, tags.tool, {tags.argument: argument}, written=text)]

    def _malformed(self, tags: Tags, text: str) -> BadCall:
        return BadCall(tags.tool, text, self.complaint)


class JsonSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """JSON between `<tool_call>` tags: objects with `name` and `arguments`, or lists of them."""

    def stops(self, *, parallel: int) -> tuple[str, ...]:
        """Where generation ends a turn: at its one call's end, or, with several calls, where the policy ends it."""
        return (tool_calls.CLOSE,) if parallel == 1 else ()

    def find(self, tools: tuple[Tool, ...], text: str) -> list[Call | BadCall]:
        """The turn's calls, in order."""
        bodies = tool_calls.call_bodies(text)
        if not bodies and tool_calls.CLOSE in text:
            return [BadCall("", text, f"Error: {tool_calls.CLOSE} without {tool_calls.OPEN} before it")]
        return [call for body in bodies for call in _read_body(tools, body)]


CallSyntax = TagSyntax | JsonSyntax
JSON_SYNTAX: Final = JsonSyntax()


def check_arguments(tools: tuple[Tool, ...], name: str, arguments: Any, *, written: str) -> Call | BadCall:
    """A call whose arguments fit the tool's schema, or why it cannot be made."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return BadCall("", written, f"Error: there is no tool named {name[:40]!r}; there are: {known}")
    try:
        error = misfit(tool.parameters, arguments, whole_integers=True)
    except EnvironmentFault:
        return BadCall(name, written, f"Error: the arguments of {name} cannot be checked")
    if error is None:
        return Call(name, arguments)
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    message = " ".join(error.message.split())
    if len(message) > MAX_PROBLEM_CHARS:
        message = f"{message[: MAX_PROBLEM_CHARS // 2]} … {message[-MAX_PROBLEM_CHARS // 2 :]}"
    return BadCall(name, written, f"Error: arguments{place[:80]} of {name}: {message}")


def _read_body(tools: tuple[Tool, ...], body: str) -> list[Call | BadCall]:
    """The calls between two tags."""
    value = tool_calls.read_json(body)
    if value is tool_calls.UNREADABLE:
        return [BadCall("", body, 'Error: not JSON. Write {"name": …, "arguments": {…}} between the tags')]
    return [_read_call(tools, item) for item in (value if isinstance(value, list) else [value])] or [
        BadCall("", body, "Error: no call between the tags")
    ]


def _read_call(tools: tuple[Tool, ...], item: Any) -> Call | BadCall:
    written = msgspec.json.encode(item).decode()
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return BadCall("", written, 'Error: a call is an object with "name" and "arguments"')
    arguments = item.get("arguments", {})
    if isinstance(arguments, str):  # some models write them as a string of JSON
        arguments = tool_calls.read_json(arguments)
    if not isinstance(arguments, dict):
        known = next((tool.name for tool in tools if tool.name == item["name"]), "")
        return BadCall(known, written, 'Error: "arguments" must be an object')
    return check_arguments(tools, item["name"], arguments, written=written)
