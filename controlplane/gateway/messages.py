"""Messages and tools of a conversation in OpenAI's shapes, and as chat templates read them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rl_core.tool_calls import call_text

Json = dict[str, Any]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; text is the one kind a text model takes."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier answer called; `arguments` as the text of a JSON object."""

    name: str
    arguments: str = "{}"


class CallGiven(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier answer, sent back."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation. Fields of OpenAI's answers that a lane never fills may come back empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallGiven] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def template_role(self) -> str:
        """The role by the name that chat templates know."""
        return "system" if self.role == "developer" else self.role

    def plain(self) -> dict[str, str]:
        """Role and text alone, calls written out as the model writes them."""
        calls = [call_text(call.function.name, call.function.arguments) for call in self.tool_calls or []]
        named = self.name or self.tool_call_id
        content = "\n".join([*([self.text] if self.text or not calls else []), *calls])
        return {"role": self.template_role, "content": content, **({"name": named} if named else {})}

    def templated(self) -> Json:
        """As chat templates that know tools read it: arguments as objects."""
        message: Json = {"role": self.template_role, "content": self.text}
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _arguments(text: str) -> Any:
    """Arguments as an object where they are one."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
