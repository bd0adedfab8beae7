"""From what was asked to the tokens that the model goes on from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.requests import ChatRequest, CompletionRequest
from rl_core.chat import ChatTokenizer
from rl_core.errors import ModelError

# Longer texts take milliseconds, in which other answers would stand still.
INLINE_CHARACTERS: Final = 8000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as it is recorded, and as it is generated from."""

    messages: list[dict[str, str]]
    token_ids: list[int]


async def chat_prompt(asked: ChatRequest, tokenizer: ChatTokenizer, *, system_prompt: str) -> PromptText:
    """The conversation in the model's template. Raises: OpenAiError 400 when the template refuses it."""
    plain = asked.plain(system_prompt=system_prompt)

    def render() -> PromptText:
        if tokenizer.takes_tools:
            templated = asked.templated(system_prompt=system_prompt)
            token_ids = tokenizer.render(templated, tools=asked.offered)
        else:
            token_ids = tokenizer.render(plain)
        return PromptText(plain, token_ids + (tokenizer.encode(asked.opening) if asked.opening else []))

    try:
        return await _run(render, sum(len(message["content"]) for message in plain))
    except ModelError as error:
        raise OpenAiError(400, str(error), code="invalid_value", param="messages") from error


async def completion_prompts(asked: CompletionRequest, tokenizer: ChatTokenizer) -> Sequence[PromptText]:
    """Each prompt of the request. Raises: OpenAiError 400 for tokens that the model does not have."""

    def encode() -> list[PromptText]:
        return [_completion(prompt, tokenizer) for prompt in asked.prompts]

    return await _run(encode, sum(len(prompt) for prompt in asked.prompts))


def _completion(prompt: str | list[int], tokenizer: ChatTokenizer) -> PromptText:
    if isinstance(prompt, str):
        return PromptText([{"role": "user", "content": prompt}], tokenizer.encode(prompt))
    if max(prompt) >= tokenizer.vocab_size:
        raise OpenAiError(400, f"the model has no token {max(prompt)}", code="invalid_value", param="prompt")
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    return PromptText([{"role": "user", "content": text}], prompt)


async def _run(work: Callable[[], T], characters: int) -> T:
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
