"""What a call of a session goes on from: the tokens of an earlier call that it extends, or its own rendering."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.messages import ChatMessage
from controlplane.gateway.prompts import INLINE_CHARACTERS, chat_prompt
from controlplane.gateway.requests import ChatRequest
from rl_core.chat import ChatTokenizer
from rl_core.environments.remote.capture import Captured
from rl_core.errors import ModelError
from rl_core.types import ToolCall


class Contexts:
    """Digests of every beginning of a conversation under its tools. Equal digests read as equal tokens.

    A message is its role, text, name and calls, the arguments of calls in one spelling: what a client adds or leaves
    out of an answer that it sends back (null fields, ids of calls) does not make it another message.
    """

    def __init__(self, asked: ChatRequest) -> None:
        digest = hashlib.sha256(msgspec.json.encode(asked.offered, order="sorted"))
        self._digests = []
        for message in asked.messages:
            digest.update(_normal(message))
            self._digests.append(digest.hexdigest())
        self._whole = digest
        self._after_answer = [message.role == "assistant" for message in asked.messages]

    def beginnings(self) -> dict[str, int]:
        """Digests of beginnings that end with an answer, the longest first, each with how many messages it has."""
        ends = [place for place, answer in enumerate(self._after_answer) if answer]
        return {self._digests[place]: place + 1 for place in reversed(ends)}

    def after(self, text: str, calls: Sequence[ToolCall]) -> str:
        """The digest once the request is answered so."""
        digest = self._whole.copy()
        digest.update(_encoded("assistant", text, "", [(call.tool, call.arguments) for call in calls]))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutPrompt:
    """What the model reads. `messages` are those that came since the call that it goes on from, or all."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    continues: bool


async def rollout_prompt(
    asked: ChatRequest, tokenizer: ChatTokenizer, *, parent: Captured | None, known: int
) -> RolloutPrompt:
    """The tokens of `parent`, which has the first `known` messages, and those of what came since; else a rendering.

    Raises: OpenAiError 400 when the template refuses the conversation.
    """
    if parent is not None:
        try:
            return await _continued(asked, tokenizer, parent, known)
        except ModelError:  # the template cannot carry sampled tokens on: the call begins a segment of its own
            pass
    rendered = await chat_prompt(asked, tokenizer, system_prompt="")
    return RolloutPrompt(rendered.messages, rendered.token_ids, continues=False)


async def _continued(asked: ChatRequest, tokenizer: ChatTokenizer, parent: Captured, known: int) -> RolloutPrompt:
    since = asked.messages[known:]
    plain = [message.plain() for message in since]
    after: list[dict[str, Any]] = [message.templated() for message in since] if tokenizer.takes_tools else [*plain]

    def render() -> RolloutPrompt:
        opening = tokenizer.encode(asked.opening) if asked.opening else []
        ids = tokenizer.continuation(after, last_token=parent.generated.token_ids[-1])
        return RolloutPrompt(plain, [*parent.token_ids, *ids, *opening], continues=True)

    if sum(len(message["content"]) for message in plain) <= INLINE_CHARACTERS:
        return render()
    return await asyncio.to_thread(render)


def too_long(tokens: int, limit: int) -> OpenAiError:
    """The conversation does not fit the rollout's window."""
    return OpenAiError(
        400,
        f"the conversation has {tokens} tokens, and the window of this rollout {limit}: make it shorter, or end",
        code="context_length_exceeded",
        param="messages",
    )


def _normal(message: ChatMessage) -> bytes:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    named = message.name or (message.tool_call_id if message.role == "tool" else "")
    return _encoded(message.template_role, message.text, named or "", calls)


def _encoded(role: str, text: str, name: str, calls: list[tuple[str, str]]) -> bytes:
    return msgspec.json.encode([role, text, name, [[tool, _spelled(arguments)] for tool, arguments in calls]]) + b"\n"


def _spelled(arguments: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
