"""One request on its way: its choices begun on replicas, read as they come, and recorded, however they end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import structlog
from django.conf import settings

from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError, RouteStale
from controlplane.gateway.replicas import Event, Flight
from controlplane.gateway.shapes import Finished
from controlplane.gateway.state import Gateway
from controlplane.gateway.texts import AnswerText, Part
from controlplane.models import new_id
from controlplane.selectors.lane_routes import LaneRoute
from controlplane.services.assignments import Assignment
from controlplane.services.generations import Answer, content_sampled, generation_record, narrowest
from controlplane.states import Consent, GenerationOutcome
from rl_core.chat import ChatTokenizer
from rl_core.engines.protocol import EndEvent, GenerateBody, TokenEvent
from rl_core.errors import EngineError
from rl_core.store import open_store
from rl_core.types import FinishReason, Generated, SamplingParams, VersionSpan

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what may be kept of it."""

    user_key: str
    session: str
    segment: str
    consent: Consent


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


class Answering:
    """A request with its choices. `close` it: that leaves the replicas, and records what was not recorded.

    Raises: OpenAiError 429 when too many are under way.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: LaneRoute,
        *,
        caller: Caller,
        choices: Sequence[Choice],
        top_logprobs: int,
        started_s: float,
    ) -> None:
        self.route = route
        self.choices = choices
        self._gateway = gateway
        self._caller = caller
        self._top_logprobs = top_logprobs
        self._started_s = started_s
        self._deadline = asyncio.get_running_loop().time() + settings.GATEWAY_TIMEOUT_S
        self._recorded = False
        self._closed = False
        gateway.enter()
        self.side, self._assignment = route.assign(caller.user_key)

    async def begin(self) -> None:
        """Get every choice's first token. Raises: OpenAiError."""
        try:
            try:
                await self._begin_all()
            except RouteStale:
                self.route = await self._gateway.route_anew(self.route)
                self.side, self._assignment = self.route.assign(self._caller.user_key)
                await self._begin_all()
        except RouteStale as error:
            raise OpenAiError(
                503, "no replica holds the lane's version yet; try again", code="no_replica", retry_after_s=2
            ) from error

    async def _begin_all(self) -> None:
        begun = await asyncio.gather(*map(self._begin, self.choices), return_exceptions=True)
        errors = [error for error in begun if isinstance(error, BaseException)]
        if errors:
            await self._leave()
            raise errors[0]

    async def _begin(self, choice: Choice) -> None:
        body = GenerateBody(
            prompt_token_ids=choice.prompt.token_ids,
            sampling=choice.prompt.sampling,
            exact_version=str(self.side.version.ref),
            return_routes=self._wants_routes(choice),
            session=self._caller.session or None,
            top_logprobs=self._top_logprobs,
        )
        choice.flight = await self._gateway.replicas.begin(
            self.side.seats,
            body,
            affinity=self._caller.session or self._caller.user_key or str(choice.generation_id),
            first_token_s=settings.GATEWAY_FIRST_TOKEN_S,
            deadline=self._deadline,
        )

    def _wants_routes(self, choice: Choice) -> bool:
        """Routes are for training alone, and large."""
        lane = self.route.lane
        trains = narrowest(self._caller.consent, lane.project.consent) == Consent.TRAIN
        return trains and content_sampled(generation_id=choice.generation_id, share=lane.record_share)

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
            log.warning("replica_broke_off", lane=self.route.lane.slug, error=str(event))
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

    async def record(self, outcome: GenerationOutcome) -> None:
        """Write every choice down, once: a later call changes nothing. Raises: OpenAiError when it cannot be."""
        if self._recorded:
            return
        self._recorded = True
        tokenizer = self._gateway.tokenizer(self.route)
        latency_ms = 1000 * (time.perf_counter() - self._started_s)
        answers = [self._answer(choice, outcome, tokenizer, latency_ms) for choice in self.choices]
        await in_database(_record_all, self.route, self._assignment, self._caller, answers)
        if outcome != GenerationOutcome.ANSWERED:
            log.info(
                "generation_unanswered",
                lane=self.route.lane.slug,
                arm=self._assignment.arm.value,
                outcome=outcome.value,
                generation=str(self.choices[0].generation_id),
                tokens=sum(len(answer.generated.token_ids) for answer in answers),
            )

    def _answer(
        self, choice: Choice, outcome: GenerationOutcome, tokenizer: ChatTokenizer, latency_ms: float
    ) -> Answer:
        generated = choice.generated(tokenizer)
        if choice.result is None:
            choice.text.finish(generated.text)  # so that calls which broke off are counted
        return Answer(
            generation_id=choice.generation_id,
            messages=choice.prompt.messages,
            prompt_token_ids=choice.prompt.token_ids,
            generated=generated,
            sampling=choice.prompt.sampling,
            latency_ms=latency_ms,
            first_token_ms=choice.first_token_ms,
            tool_calls=choice.text.attempts,
            outcome=outcome,
        )

    async def close(self, outcome: GenerationOutcome | None) -> None:
        """Leave the replicas. With an outcome, record under it what was not recorded. Raises nothing expected."""
        if not self._closed:
            self._closed = True
            self._gateway.leave()
        await self._leave()
        if outcome is not None:
            try:
                await self.record(outcome)
            except OpenAiError as error:
                log.error("generation_lost", lane=self.route.lane.slug, outcome=outcome.value, error=str(error))

    async def _leave(self) -> None:
        flights = [choice.flight for choice in self.choices if choice.flight is not None]
        await asyncio.gather(*(flight.aclose() for flight in flights), return_exceptions=True)


async def _read(choice: Choice, queue: asyncio.Queue[tuple[Choice, Event | EngineError]]) -> None:
    assert choice.flight is not None
    try:
        async for event in choice.flight.events():
            queue.put_nowait((choice, event))
    except EngineError as error:
        queue.put_nowait((choice, error))


def _record_all(route: LaneRoute, assignment: Assignment, caller: Caller, answers: Sequence[Answer]) -> None:
    store = open_store(settings.STORE_URL)
    side = route.canary if route.canary is not None and assignment.arm == route.canary.arm else route.promoted
    for answer in answers:
        generation_record(
            lane=route.lane,
            version=side.version,
            answer=answer,
            user_key=caller.user_key,
            session=caller.session,
            segment=caller.segment,
            consent=caller.consent,
            store=store,
            assignment=assignment,
        )


def _spans(tokens: Sequence[TokenEvent]) -> list[VersionSpan]:
    """Version spans of tokens that name a version where it changes."""
    starts = [place for place, token in enumerate(tokens) if token.version]
    ends = [*starts[1:], len(tokens)]
    return [
        VersionSpan(start, end, tokens[start].version) for start, end in zip(starts, ends, strict=False) if end > start
    ]
