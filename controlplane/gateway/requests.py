"""What a request may say, in OpenAI's shapes. What a lane does not honour is refused by name, never ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.messages import ChatMessage, NamedTool, ToolSpec
from rl_core.errors import SpecError
from rl_core.tool_calls import CLOSE, call_opening, describe_tools
from rl_core.types import SamplingParams

MAX_CHOICES = 8
MAX_MESSAGES = 200
MAX_CHARACTERS = 200_000
MAX_COMPLETION_TOKENS = 4096  # and never more than the model's window leaves
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own for /v1/completions
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 64
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
KEY_CHARACTERS = 200

_SLUG = re.compile(r"[-a-zA-Z0-9_]{1,64}")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

T = TypeVar("T")
Json = dict[str, Any]


def _refuse(message: str, param: str, *, code: str = "invalid_value") -> OpenAiError:
    return OpenAiError(400, message, code=code, param=param)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides its choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    def check(self) -> None:
        """Raises: OpenAiError 404 for a name that no lane can have, 400 naming the parameter."""
        if not _SLUG.fullmatch(self.model):
            raise OpenAiError(404, f"there is no lane {self.model[:80]!r}", code="model_not_found", param="model")
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise _refuse(f"{name} is not honoured; leave it out", name, code="unsupported_parameter")
        if not 1 <= self.choices <= MAX_CHOICES:
            raise _refuse(f"n must be 1 to {MAX_CHOICES}, not {self.n}", "n")
        if len(self.stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in self.stops):
            raise _refuse(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARACTERS} characters", "stop")
        if self.stream_options is not None and not self.stream:
            raise _refuse("stream_options are for streams", "stream_options")
        if len(self.user_key) > KEY_CHARACTERS:
            raise _refuse(f"user has at most {KEY_CHARACTERS} characters", "user")

    @property
    def choices(self) -> int:
        """How many completions of each prompt are wanted."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def user_key(self) -> str:
        """The user that the body names; empty for none."""
        return self.user or self.safety_identifier or ""

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, *, limit: int, choice: int, stop: tuple[str, ...] = ()) -> SamplingParams:
        """How choice number `choice` is drawn. Raises: OpenAiError 400."""
        try:
            return SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                max_tokens=min(limit, MAX_COMPLETION_TOKENS),
                stop=(*self.stops, *stop),
                seed=None if self.seed is None else (self.seed + choice) % 2**31,
            )
        except SpecError as error:
            name = str(error).split(" ", 1)[0]
            raise OpenAiError(400, str(error), code="invalid_value", param=name) from error


class ChatRequest(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None

    def check(self) -> None:
        """Raises: OpenAiError."""
        Asked.check(self)
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise _refuse(f"1 to {MAX_MESSAGES} messages", "messages")
        if self.top_logprobs and not self.logprobs:
            raise _refuse("top_logprobs needs logprobs", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise _refuse(f"top_logprobs must be 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise _refuse(
                "only the response_format of type text is honoured", "response_format", code="unsupported_parameter"
            )
        self._check_tools()
        characters = sum(len(message["content"]) for message in self.plain(system_prompt=""))
        if characters > MAX_CHARACTERS:
            raise _refuse(f"at most {MAX_CHARACTERS} characters, not {characters}", "messages", code="too_long")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(names) > MAX_TOOLS or len(set(names)) < len(names):
            raise _refuse(f"at most {MAX_TOOLS} tools, each name once", "tools")
        if any(not _TOOL_NAME.fullmatch(name) for name in names):
            raise _refuse("a tool's name has 1 to 64 of a-z, A-Z, 0-9, _ and -", "tools")
        wanted = self.tool_choice
        if wanted not in (None, "none", "auto") and not names:
            raise _refuse("tool_choice needs tools", "tool_choice")
        if isinstance(wanted, NamedTool) and wanted.function.name not in names:
            raise _refuse(f"tool_choice names {wanted.function.name[:64]!r}, which is no tool", "tool_choice")
        for message in self.messages:
            if message.tool_calls and message.role != "assistant":
                raise _refuse("only the assistant's messages have tool_calls", "messages")
            if message.content is None and message.role != "assistant":
                raise _refuse(f"a message of {message.role} needs content", "messages")

    @property
    def offered(self) -> list[Json]:
        """The tools that the model may call, as JSON."""
        if self.tool_choice == "none":
            return []
        tools: list[Json] = msgspec.to_builtins(self.tools or [])
        return tools

    @property
    def opening(self) -> str:
        """What the answer is made to begin with, so that it calls a tool."""
        if isinstance(self.tool_choice, NamedTool):
            return call_opening(self.tool_choice.function.name)
        return call_opening() if self.tool_choice == "required" else ""

    def sampling_of(self, choice: int) -> SamplingParams:
        """How a choice is drawn. Raises: OpenAiError 400."""
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        single = self.offered and (self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool))
        limit = limits[0] if limits else MAX_COMPLETION_TOKENS
        return self.sampling(limit=limit, choice=choice, stop=(CLOSE,) if single else ())

    def plain(self, *, system_prompt: str) -> list[dict[str, str]]:
        """The conversation as role and text, the lane's prompt and the tools in its system message."""
        passages = [describe_tools(self.offered)] if self.offered else []
        return _with_system([message.plain() for message in self.messages], system_prompt, passages)

    def templated(self, *, system_prompt: str) -> list[Json]:
        """The conversation for a template that takes tools by itself."""
        return _with_system([message.templated() for message in self.messages], system_prompt, [])


class CompletionRequest(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`: text or tokens that the model goes on from, without a template or the lane's prompt."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None

    def check(self) -> None:
        """Raises: OpenAiError."""
        Asked.check(self)
        if not 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise _refuse(f"logprobs must be 0 to {MAX_TOP_LOGPROBS}", "logprobs")
        if self.best_of is not None and self.best_of != self.choices:
            raise _refuse("best_of is not honoured; leave it out", "best_of", code="unsupported_parameter")
        prompts = self.prompts
        if not 1 <= len(prompts) * self.choices <= MAX_CHOICES:
            raise _refuse(f"1 to {MAX_CHOICES} completions a request", "prompt")
        if any(not prompt for prompt in prompts):
            raise _refuse("a prompt must not be empty", "prompt")
        if any(isinstance(prompt, list) and not all(0 <= token < 2**31 for token in prompt) for prompt in prompts):
            raise _refuse("token ids are 0 or more", "prompt")
        if sum(len(prompt) for prompt in prompts) > MAX_CHARACTERS:
            raise _refuse(f"at most {MAX_CHARACTERS} characters", "prompt", code="too_long")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each as text or as token ids. Raises: OpenAiError for a mixture of ids and others."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        others = [one for one in self.prompt if not isinstance(one, int)]
        if ids and others:
            raise _refuse("prompt mixes token ids with texts or lists", "prompt")
        return [ids] if ids else others

    def sampling_of(self, choice: int) -> SamplingParams:
        """How a choice is drawn. Raises: OpenAiError 400."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(limit=limit, choice=choice)


def parse_chat(body: bytes) -> ChatRequest:
    """Read a chat request. Raises: OpenAiError, naming the parameter."""
    request = _decode(body, ChatRequest)
    request.check()
    return request


def parse_rollout_chat(body: bytes, *, model: str) -> ChatRequest:
    """Read a chat request of a session. Its key says which model answers, whatever name the client has for it.

    Raises: OpenAiError, naming the parameter.
    """
    request = msgspec.structs.replace(_decode(body, ChatRequest), model=model)
    request.check()
    if request.choices != 1:
        raise _refuse("a session has one answer to each request: ask again for another", "n")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a completion request. Raises: OpenAiError, naming the parameter."""
    request = _decode(body, CompletionRequest)
    request.check()
    return request


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        text = str(error)
        place = re.search(r"at `\$\.([^`]*)`", text) or re.search(r"unknown field `([^`]*)`", text)
        param = place[1] if place else None
        raise OpenAiError(400, f"the request is not valid: {text}", code="invalid_request", param=param) from error


def _with_system(messages: list[Any], system_prompt: str, passages: list[str]) -> list[Any]:
    """A system message of the request replaces the lane's; passages are added to either."""
    own = messages[0]["content"] if messages[0]["role"] == "system" else system_prompt
    content = "\n\n".join(part for part in [own, *passages] if part)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": content}, *messages] if content else messages
