"""OpenAI's answers, whole and as chunks of a stream. Each choice names the generation that it is, for feedback."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from controlplane.gateway.texts import Part
from rl_core.engines.protocol import TokenEvent
from rl_core.types import FinishReason, Generated, ToolCall

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A choice that has ended."""

    index: int
    generation_id: uuid.UUID
    prompt_token_ids: Sequence[int]
    parts: list[Part]
    tokens: list[TokenEvent]
    result: Generated

    @property
    def text(self) -> str:
        """What it says, calls left out."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls that the client shall make."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


class Shape(Protocol):
    """How one endpoint writes its answers. `logprobs` holds the tokens whose logprobs are due, None for none asked."""

    def whole(self, choices: Sequence[Finished]) -> Json:
        """The answer of a call that does not stream."""
        ...

    def opening(self, index: int, generation_id: uuid.UUID) -> Json:
        """The first chunk of a choice."""
        ...

    def piece(self, index: int, part: Part, *, number: int, logprobs: Sequence[TokenEvent] | None) -> Json:
        """A chunk of text, or tool call number `number` of the choice."""
        ...

    def ending(self, index: int, reason: str, *, logprobs: Sequence[TokenEvent] | None) -> Json:
        """The last chunk of a choice."""
        ...

    def usage_chunk(self, choices: Sequence[Finished]) -> Json:
        """The chunk that counts tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    identity: uuid.UUID
    model: str
    version: str
    strings: Sequence[str]
    logprobs: bool
    usage_in_stream: bool
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def _envelope(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": f"{self.prefix}-{self.identity}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.version,
            "choices": choices,
            **more,
        }

    def _chunk(self, choice: Json) -> Json:
        # A stream that ends with usage says in every other chunk that it is not there yet.
        return self._envelope(self.chunk_object, [choice], **({"usage": None} if self.usage_in_stream else {}))

    def usage_chunk(self, choices: Sequence[Finished]) -> Json:
        """The chunk that counts tokens."""
        return self._envelope(self.chunk_object, [], usage=_usage(choices))

    def _string(self, token: int) -> str:
        return self.strings[token] if token < len(self.strings) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape(_Base):
    """`chat.completion`."""

    prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def whole(self, choices: Sequence[Finished]) -> Json:
        """The answer of a call that does not stream."""
        written = []
        for choice in choices:
            calls = [call_json(call, self.identity, choice.index, number) for number, call in enumerate(choice.calls)]
            message: Json = {"role": "assistant", "content": choice.text or (None if calls else ""), "refusal": None}
            if calls:
                message["tool_calls"] = calls
            written.append(
                {
                    "index": choice.index,
                    "generation_id": str(choice.generation_id),
                    "message": message,
                    "logprobs": self._logprobs(choice.tokens) if self.logprobs else None,
                    "finish_reason": finish_reason(choice.result.finish_reason, called=bool(calls)),
                }
            )
        return self._envelope(self.whole_object, written, usage=_usage(choices))

    def opening(self, index: int, generation_id: uuid.UUID) -> Json:
        """The chunk that names the role and the generation."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(
            {
                "index": index,
                "generation_id": str(generation_id),
                "delta": delta,
                "logprobs": None,
                "finish_reason": None,
            }
        )

    def piece(self, index: int, part: Part, *, number: int, logprobs: Sequence[TokenEvent] | None) -> Json:
        """A chunk of text, or a whole tool call."""
        delta: Json = {"content": part}
        if isinstance(part, ToolCall):
            delta = {"tool_calls": [{"index": number, **call_json(part, self.identity, index, number)}]}
        return self._chunk(self._choice(index, delta, None, logprobs))

    def ending(self, index: int, reason: str, *, logprobs: Sequence[TokenEvent] | None) -> Json:
        """The last chunk of a choice."""
        return self._chunk(self._choice(index, {}, reason, logprobs))

    def _choice(self, index: int, delta: Json, reason: str | None, logprobs: Sequence[TokenEvent] | None) -> Json:
        written = self._logprobs(logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": written, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> Json:
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*top) for top in one.tops]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._string(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape(_Base):
    """`text_completion`."""

    prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def whole(self, choices: Sequence[Finished]) -> Json:
        """The answer of a call that does not stream."""
        written = [
            {
                "index": choice.index,
                "generation_id": str(choice.generation_id),
                "text": choice.text,
                "logprobs": self._logprobs(choice.tokens) if self.logprobs else None,
                "finish_reason": finish_reason(choice.result.finish_reason, called=False),
            }
            for choice in choices
        ]
        return self._envelope(self.whole_object, written, usage=_usage(choices))

    def opening(self, index: int, generation_id: uuid.UUID) -> Json:
        """The chunk that names the generation."""
        return self._chunk({**self._choice(index, "", None, None), "generation_id": str(generation_id)})

    def piece(self, index: int, part: Part, *, number: int, logprobs: Sequence[TokenEvent] | None) -> Json:
        """A chunk of text."""
        return self._chunk(self._choice(index, part if isinstance(part, str) else "", None, logprobs))

    def ending(self, index: int, reason: str, *, logprobs: Sequence[TokenEvent] | None) -> Json:
        """The last chunk of a choice."""
        return self._chunk(self._choice(index, "", reason, logprobs))

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenEvent] | None) -> Json:
        written = self._logprobs(logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": written, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> Json:
        """Offsets count from the beginning of these tokens."""
        strings = [self._string(one.token) for one in tokens]
        offsets, at = [], 0
        for string in strings:
            offsets.append(at)
            at += len(string)
        return {
            "tokens": strings,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{self._string(token): logprob for token, logprob in one.tops} for one in tokens],
            "text_offset": offsets,
        }


def call_json(call: ToolCall, identity: uuid.UUID, index: int, number: int) -> Json:
    """A tool call, named by the answer, the choice and its number in it."""
    return {
        "id": f"call_{identity.hex[-20:]}_{index}_{number}",
        "type": "function",
        "function": {"name": call.tool, "arguments": call.arguments},
    }


def finish_reason(reason: FinishReason, *, called: bool) -> str:
    """Why the choice ended, by OpenAI's name."""
    if reason is FinishReason.STOP and called:
        return "tool_calls"
    return "stop" if reason is FinishReason.STOP else "length"


def _usage(choices: Sequence[Finished]) -> Json:
    """Tokens of the call. A prompt with several choices counts once."""
    prompts = {tuple(choice.prompt_token_ids): choice for choice in choices}
    prompt = sum(len(tokens) for tokens in prompts)
    cached = sum(min(choice.result.cached_tokens, len(tokens)) for tokens, choice in prompts.items())
    sampled = sum(len(choice.result.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
