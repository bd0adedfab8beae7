"""A request with its choices while it is under way: read as they come from replicas, and left, however it ends."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import structlog
from django.conf import settings

from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.replicas import Event, Flight
from controlplane.gateway.shapes import Finished
from controlplane.gateway.state import Gateway
from controlplane.gateway.texts import AnswerText, Part
from controlplane.models import new_id
from controlplane.states import GenerationOutcome
from rl_core.chat import ChatTokenizer
from rl_core.engines.protocol import EndEvent, TokenEvent
from rl_core.errors import EngineError
from rl_core.types import FinishReason, Generated, SamplingParams, VersionSpan

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one choice goes on from. `messages` is what is recorded of it."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)
class Choice:
    """One completion, which is one generation."""

    index: int
    prompt: Prompt
    text: AnswerText
    generation_id: uuid.UUID = field(default_factory=new_id)
    tokens: list[TokenEvent] = field(default_factory=list)
    result: Generated | None = None
    first_token_ms: float | None = None
    flight: Flight | None = None

    def take(self, event: Event, *, started_s: float) -> None:
        """Note what came."""
        if isinstance(event, EndEvent):
            self.result = event.result
            return
        if not self.tokens:
            self.first_token_ms = 1000 * (time.perf_counter() - started_s)
        self.tokens.append(event)

    def generated(self, tokenizer: ChatTokenizer) -> Generated:
        """The result; of a choice that broke off, what there was of it."""
        if self.result is not None:
            return self.result
        ids = [token.token for token in self.tokens]
        return Generated(
            token_ids=ids,
            logprobs=[token.logprob for token in self.tokens],
            text=tokenizer.decode(ids),
            finish_reason=FinishReason.ABORT,
            spans=_spans(self.tokens),
            prompt_tokens=len(self.prompt.token_ids),
        )


class UnderWay(ABC):
    """A request with its choices. `close` it: that leaves the replicas.

    Raises: OpenAiError 429 when too many are under way.
    """

    def __init__(
        self, gateway: Gateway, *, choices: Sequence[Choice], started_s: float, session: uuid.UUID | None = None
    ) -> None:
        self.choices = choices
        self._gateway = gateway
        self._started_s = started_s
        self._deadline = asyncio.get_running_loop().time() + settings.GATEWAY_TIMEOUT_S
        self._closed = False
        self._session = session
        gateway.enter(session)

    @property
    @abstractmethod
    def version(self) -> str:
        """The version that answers, once it began."""

    @abstractmethod
    async def begin(self) -> None:
        """Get every choice's first token. Raises: OpenAiError."""

    @abstractmethod
    async def record(self, outcome: GenerationOutcome) -> None:
        """Write down what is to be, once: a later call changes nothing. Raises: OpenAiError when it cannot be."""

    async def events(self) -> AsyncGenerator[tuple[Choice, Event], None]:
        """Every choice's tokens and end, as they come. Raises: OpenAiError."""
        queue: asyncio.Queue[tuple[Choice, Event | EngineError]] = asyncio.Queue()
        readers = [asyncio.create_task(_read(choice, queue)) for choice in self.choices]
        try:
            left = len(readers)
            while left:
                choice, event = await self._next(queue)
                choice.take(event, started_s=self._started_s)
                left -= isinstance(event, EndEvent)
                yield choice, event
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _next(self, queue: asyncio.Queue[tuple[Choice, Event | EngineError]]) -> tuple[Choice, Event]:
        try:
            async with asyncio.timeout_at(self._deadline):
                choice, event = await queue.get()
        except TimeoutError as error:
            limit = settings.GATEWAY_TIMEOUT_S
            raise OpenAiError(504, f"the answer took longer than {limit} s", code="timeout") from error
        if isinstance(event, EngineError):
            log.warning("replica_broke_off", **self._named(), error=str(event))
            raise OpenAiError(503, "the replica broke off; ask again", code="broken_off") from event
        return choice, event

    def finished(self, choice: Choice, parts: list[Part]) -> Finished:
        """A choice that has ended, for its shape."""
        assert choice.result is not None
        return Finished(
            index=choice.index,
            generation_id=choice.generation_id,
            prompt_token_ids=choice.prompt.token_ids,
            parts=parts,
            tokens=choice.tokens,
            result=choice.result,
        )

    async def close(self, outcome: GenerationOutcome | None) -> None:
        """Leave the replicas. With an outcome, record under it what was not recorded. Raises nothing expected."""
        if not self._closed:
            self._closed = True
            self._gateway.leave(self._session)
        await self._leave()
        if outcome is not None:
            try:
                await self.record(outcome)
            except OpenAiError as error:
                log.error("generation_lost", **self._named(), outcome=outcome.value, error=str(error))

    async def _leave(self) -> None:
        flights = [choice.flight for choice in self.choices if choice.flight is not None]
        await asyncio.gather(*(flight.aclose() for flight in flights), return_exceptions=True)

    @abstractmethod
    def _named(self) -> dict[str, str]:
        """Whose request it is, for the log."""


async def _read(choice: Choice, queue: asyncio.Queue[tuple[Choice, Event | EngineError]]) -> None:
    assert choice.flight is not None
    try:
        async for event in choice.flight.events():
            queue.put_nowait((choice, event))
    except EngineError as error:
        queue.put_nowait((choice, error))


def _spans(tokens: Sequence[TokenEvent]) -> list[VersionSpan]:
    """Version spans of tokens that name a version where it changes."""
    starts = [place for place, token in enumerate(tokens) if token.version]
    ends = [*starts[1:], len(tokens)]
    return [
        VersionSpan(start, end, tokens[start].version) for start, end in zip(starts, ends, strict=False) if end > start
    ]
