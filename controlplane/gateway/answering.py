"""A lane's request on its way: its choices begun on the arm's replicas, and recorded, however they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from django.conf import settings

from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError, RouteStale
from controlplane.gateway.state import Gateway
from controlplane.gateway.under_way import Choice, UnderWay
from controlplane.selectors.lane_routes import LaneRoute
from controlplane.services.assignments import Assignment
from controlplane.services.generations import Answer, content_sampled, generation_record, narrowest
from controlplane.states import Consent, GenerationOutcome
from rl_core.chat import ChatTokenizer
from rl_core.engines.protocol import GenerateBody
from rl_core.store import open_store

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what may be kept of it."""

    user_key: str
    session: str
    segment: str
    consent: Consent


class Answering(UnderWay):
    """A lane's request: every choice of it is a generation, recorded however it ends."""

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
        super().__init__(gateway, choices=choices, started_s=started_s)
        self.route = route
        self._caller = caller
        self._top_logprobs = top_logprobs
        self._recorded = False
        self.side, self._assignment = route.assign(caller.user_key)

    @property
    def version(self) -> str:
        """The version of the user's arm."""
        return str(self.side.version.ref)

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

    def _named(self) -> dict[str, str]:
        return {"lane": self.route.lane.slug}


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
