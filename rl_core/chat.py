"""Text to tokens and back, without torch or transformers: the tokenizer and chat template of a model folder.

The folder is a Hugging Face checkpoint: `tokenizer.json`, `tokenizer_config.json`, and the template either there or
in `chat_template.jinja`. Templates are model-supplied code and run in Jinja's immutable sandbox.

Token in, token out: after a turn was sampled its tokens are never made again from text. `continuation` gives exactly
what the template puts between the sampled turn and the next one.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl_core import tool_calls
from rl_core.errors import ModelError

ChatMessage = dict[str, Any]

# A string that no template rewrites and no vocabulary merges: marks where the sampled turn stood.
_TURN = "\ue000turn\ue001"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str, *, eos_ids: frozenset[int], named: dict[str, str]) -> None:
        """`named` holds the special tokens that templates refer to by name, such as `bos_token`."""
        self._tokenizer = tokenizer
        self._named = named
        self.eos_ids = eos_ids
        self._specials = sorted(
            (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special), key=len
        )
        try:
            environment = _template_environment()
            self._template = environment.from_string(template)
            self._knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(template))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not parse: {error}") from error

    @classmethod
    def load(cls, folder: Path | str) -> ChatTokenizer:
        """Read tokenizer, template and end tokens of a model folder. Raises: ModelError."""
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise ModelError(f"{path} holds no tokenizer.json: not a model folder; `make setup` converts the model")
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ModelError(f"{path}/tokenizer.json does not load: {error}") from error
        config = _read_json(path / "tokenizer_config.json")
        named = {name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        eos_ids = _eos_ids(path, tokenizer, named)
        return cls(tokenizer, _template_text(path, config), eos_ids=eos_ids, named=named)

    @property
    def vocab_size(self) -> int:
        """How many token ids the tokenizer knows; the model's embedding may be padded past it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows tools, and writes calls in the form that `tool_calls` reads.

        Some templates teach a form of their own; a model under one of those is told of its tools in words.
        """
        if not self._knows_tools:
            return False
        probe = {"name": "probe", "arguments": {"x": 1}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": probe}]}
        try:
            text = self.render_text([{"role": "user", "content": "."}, call], add_generation_prompt=False)
        except ModelError:
            return False
        bodies = tool_calls.call_bodies(text)
        return bool(bodies) and tool_calls.read_json(bodies[-1]) == probe

    @cached_property
    def token_strings(self) -> list[str]:
        """The text of each token id, special tokens spelled out: what stop strings are matched against.

        A token that holds part of a character reads as U+FFFD.
        """
        # Decoded behind an anchor, because some decoders strip the leading space of a text.
        anchor = self.encode("a")[:1]
        width = len(self._tokenizer.decode(anchor, skip_special_tokens=False))
        pairs = [[*anchor, token_id] for token_id in range(self.vocab_size)]
        return [text[width:] for text in self._tokenizer.decode_batch(pairs, skip_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text. Special tokens in it count as special; none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens, by default without special ones such as the end of the turn."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def render_text(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the model reads it, as text; `tools` only where `takes_tools` says that they are read.

        Raises: ModelError when the template refuses it.
        """
        try:
            return self._template.render(
                messages=self._defused(messages),
                add_generation_prompt=add_generation_prompt,
                tools=self._defused(tools) if tools else None,
                **self._named,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise ModelError(f"the chat template refuses these messages: {error}") from error

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The conversation as tokens, ending with the assistant's header by default. Raises: ModelError."""
        return self.encode(self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def continuation(self, messages_after: list[ChatMessage], *, last_token: int | None = None) -> list[int]:
        """The tokens to append after a sampled assistant turn: its end, `messages_after`, the next turn's header.

        `last_token` is the last token sampled; an end token that the policy sampled itself is not appended again.
        Raises: ModelError when the template does not keep an assistant's text as it is.
        """
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _TURN}]
        text = self.render_text([*before, *messages_after])
        head, found, tail = text.rpartition(_TURN)
        if not found or not head:
            raise ModelError("the chat template drops or rewrites assistant turns: it cannot carry sampled tokens on")
        ids = self.encode(tail)
        if last_token in self.eos_ids and ids and ids[0] in self.eos_ids:
            return ids[1:]
        return ids

    def turn(self, text: str) -> list[int]:
        """The tokens of an assistant turn that says `text`, its end token included: as if they had been sampled.

        Raises: ModelError when the template does not keep an assistant's text as it is.
        """
        end = [token for token in self.continuation([]) if token in self.eos_ids]
        return [*self.encode(self._defused(text)), *end[:1]]

    def _defused(self, value: Any) -> Any:
        """Texts in messages or tools with special tokens broken up, so that none can forge a turn."""
        if isinstance(value, str):
            for special in self._specials:
                if special in value:
                    value = value.replace(special, f"{special[0]}\u200b{special[1:]}")
            return value
        if isinstance(value, dict):
            return {key: self._defused(one) for key, one in value.items()}
        return [self._defused(one) for one in value] if isinstance(value, list) else value


def _template_environment() -> jinja2.Environment:
    """The environment that transformers gives to chat templates, which templates rely on."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(layout: str) -> str:
        return datetime.now().astimezone().strftime(layout)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. Raises: ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    """The template as text: the file of its own first, else the tokenizer's configuration."""
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ModelError(f"{folder} has no chat template: Slipway trains models that are made for conversations")
    return template


def _eos_ids(folder: Path, tokenizer: Tokenizer, named: dict[str, str]) -> frozenset[int]:
    """Every token that ends a turn, by any of the folder's configurations. Raises: ModelError when none does."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    named_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if named_id is not None:
        ids.add(named_id)
    if not ids:
        raise ModelError(f"{folder} names no end-of-sequence token in any of its configurations")
    return frozenset(ids)
