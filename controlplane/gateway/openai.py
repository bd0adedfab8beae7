"""OpenAI's shapes: what a request may say, what an answer looks like, and how errors read. Imports no Django views."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from rl_core.errors import SpecError
from rl_core.types import FinishReason, Generated, SamplingParams

MAX_MESSAGES = 200
MAX_CHARACTERS = 200_000


class OpenAiError(Exception):
    """An error in OpenAI's shape: `{error: {message, type, param, code}}`."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; text is the one kind a text model takes."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str = ""

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of OpenAI's request that a lane honours; anything else is refused by name, never ignored."""

    model: str
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    logprobs: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def sampling(self) -> SamplingParams:
        """The request as sampling parameters. Raises: OpenAiError."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = self.max_completion_tokens or self.max_tokens or 256
        if len(stop) > 4 or any(not text or len(text) > 64 for text in stop):
            raise OpenAiError(400, "at most 4 stop strings of 1 to 64 characters", code="invalid_value", param="stop")
        try:
            return SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                max_tokens=min(limit, 4096),
                stop=tuple(stop),
                seed=None if self.seed is None else self.seed % 2**31,
            )
        except SpecError as error:
            raise OpenAiError(400, str(error), code="invalid_value") from error


def parse_chat(body: bytes) -> ChatRequest:
    """Read a chat request. Raises: OpenAiError (400), naming the parameter."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except msgspec.MsgspecError as error:
        text = str(error)
        param = text.rsplit("`$.", 1)[1].rstrip("`") if "`$." in text else None
        raise OpenAiError(400, f"the request is not valid: {text}", code="invalid_request", param=param) from error
    except UnicodeDecodeError as error:
        raise OpenAiError(400, "the request is not UTF-8", code="invalid_request") from error
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        raise OpenAiError(400, f"1 to {MAX_MESSAGES} messages", code="invalid_value", param="messages")
    if sum(len(message.plain()["content"]) for message in request.messages) > MAX_CHARACTERS:
        raise OpenAiError(400, f"at most {MAX_CHARACTERS} characters", code="too_long", param="messages")
    return request


def chat_answer(
    *, generation_id: uuid.UUID, model: str, version: str, generated: Generated, tokens: list[str] | None
) -> dict[str, Any]:
    """A chat completion. `tokens` are the sampled tokens' texts when logprobs were asked for."""
    finish = "length" if generated.finish_reason == FinishReason.LENGTH else "stop"
    logprobs: dict[str, Any] | None = None
    if tokens is not None:
        pairs = zip(tokens, generated.logprobs, strict=True)
        logprobs = {"content": [{"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]}
    sampled = len(generated.token_ids)
    return {
        "id": f"chatcmpl-{generation_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": version,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": generated.text, "refusal": None},
                "logprobs": logprobs,
                "finish_reason": finish,
            }
        ],
        "usage": {
            "prompt_tokens": generated.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": generated.prompt_tokens + sampled,
        },
    }
