"""OpenAI's response objects, whole and as chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rl_core.engines.request import ActiveSequence, TextCodec
from rl_core.engines.request import Request as EngineRequest
from rl_core.engines.sampling import Sampled
from rl_core.engines.stops import cut_at_stop
from rl_core.types import FinishReason, Generated

Json = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def whole(self, requests: list[EngineRequest], results: list[Generated], sequences: list[ActiveSequence]) -> Json:
        """The answer of a call that does not stream."""
        ...

    def opening(self, choice: int) -> Json | None:
        """The first chunk of a choice."""
        ...

    def piece(self, choice: int, text: str, token: Sampled) -> Json:
        """The chunk of one token."""
        ...

    def ending(self, choice: int, text: str, result: Generated) -> Json:
        """The last chunk of a choice."""
        ...

    def usage_chunk(self, requests: list[EngineRequest], results: list[Generated]) -> Json:
        """The chunk that counts tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    identity: str
    model: str
    codec: TextCodec
    logprobs: bool
    token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def _envelope(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.identity, "object": kind, "created": self.created, "model": self.model, "choices": choices,
            **more,
        }  # fmt: skip

    def _chunk(self, choice: Json) -> Json:
        return self._envelope(self.chunk_object, [choice])

    def usage_chunk(self, requests: list[EngineRequest], results: list[Generated]) -> Json:
        """The chunk that counts tokens."""
        return self._envelope(self.chunk_object, [], usage=_usage(requests, results))

    def _token(self, token: int) -> str:
        strings = self.codec.token_strings
        return strings[token] if token < len(strings) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape(_Base):
    """`chat.completion`."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def whole(self, requests: list[EngineRequest], results: list[Generated], sequences: list[ActiveSequence]) -> Json:
        """The answer of a call that does not stream."""
        choices = []
        for index, (request, result, sequence) in enumerate(zip(requests, results, sequences, strict=True)):
            text = cut_at_stop(result.text, request.sampling.stop)
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": _reason(result.finish_reason),
                "logprobs": self._logprobs(sequence.results) if self.logprobs else None,
            }
            if self.token_ids:
                choice["token_ids"] = result.token_ids
            choices.append(choice)
        more = {"prompt_token_ids": list(requests[0].prompt)} if self.token_ids else {}
        return self._envelope(self.whole_object, choices, usage=_usage(requests, results), **more)

    def opening(self, choice: int) -> Json | None:
        """The chunk that names the role."""
        return self._chunk({"index": choice, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, choice: int, text: str, token: Sampled) -> Json:
        """The chunk of one token."""
        entry: Json = {"index": choice, "delta": {"content": text}, "finish_reason": None}
        if self.logprobs:
            entry["logprobs"] = self._logprobs([token])
        if self.token_ids:
            entry["token_ids"] = [token.token]
        return self._chunk(entry)

    def ending(self, choice: int, text: str, result: Generated) -> Json:
        """The last chunk of a choice."""
        delta = {"content": text} if text else {}
        return self._chunk({"index": choice, "delta": delta, "finish_reason": _reason(result.finish_reason)})

    def _logprobs(self, tokens: list[Sampled]) -> Json:
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*top) for top in one.tops]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape(_Base):
    """`text_completion`."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def whole(self, requests: list[EngineRequest], results: list[Generated], sequences: list[ActiveSequence]) -> Json:
        """The answer of a call that does not stream."""
        choices = []
        for index, (request, result, sequence) in enumerate(zip(requests, results, sequences, strict=True)):
            choice: Json = {
                "index": index,
                "text": cut_at_stop(result.text, request.sampling.stop),
                "finish_reason": _reason(result.finish_reason),
                "logprobs": self._logprobs(sequence.results) if self.logprobs else None,
            }
            if self.token_ids:
                choice |= {"token_ids": result.token_ids, "prompt_token_ids": list(request.prompt)}
            choices.append(choice)
        return self._envelope(self.whole_object, choices, usage=_usage(requests, results))

    def opening(self, choice: int) -> Json | None:
        """Completions have no opening chunk."""
        return None

    def piece(self, choice: int, text: str, token: Sampled) -> Json:
        """The chunk of one token."""
        logprobs = self._logprobs([token]) if self.logprobs else None
        entry: Json = {"index": choice, "text": text, "finish_reason": None, "logprobs": logprobs}
        if self.token_ids:
            entry["token_ids"] = [token.token]
        return self._chunk(entry)

    def ending(self, choice: int, text: str, result: Generated) -> Json:
        """The last chunk of a choice."""
        reason = _reason(result.finish_reason)
        return self._chunk({"index": choice, "text": text, "finish_reason": reason, "logprobs": None})

    def _logprobs(self, tokens: list[Sampled]) -> Json:
        strings = [self._token(one.token) for one in tokens]
        offsets = [sum(len(text) for text in strings[:place]) for place in range(len(strings))]
        return {
            "tokens": strings,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{self._token(token): logprob for token, logprob in one.tops} for one in tokens],
            "text_offset": offsets,
        }


def _reason(reason: FinishReason) -> str:
    """OpenAI knows no abort; a cut-off answer is one of limited length."""
    return FinishReason.LENGTH if reason is FinishReason.ABORT else reason


def _usage(requests: list[EngineRequest], results: list[Generated]) -> Json:
    """Tokens of the call. A prompt with several choices counts once."""
    prompts = {tuple(request.prompt): len(request.prompt) for request in requests}
    prompt, completion = sum(prompts.values()), sum(len(result.token_ids) for result in results)
    cached = min(results[0].cached_tokens, prompt) if results else 0
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
