"""A session's call on its way: begun on the rollout's replicas, written down before it is given, or given again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import structlog
from django.conf import settings

from controlplane.errors import ControlPlaneError
from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError, RouteStale
from controlplane.gateway.replicas import Event
from controlplane.gateway.rollout_prompts import Contexts
from controlplane.gateway.state import Gateway
from controlplane.gateway.texts import Part
from controlplane.gateway.under_way import Choice, UnderWay
from controlplane.models import RolloutCall
from controlplane.selectors.rollout_routes import RolloutRoute
from controlplane.services.rollout_sessions import call_record
from controlplane.states import GenerationOutcome
from rl_core.engines.protocol import EndEvent, GenerateBody, TokenEvent
from rl_core.environments.remote.capture import Captured
from rl_core.store import open_store
from rl_core.types import Generated, ToolCall

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a client calls its request: its digest, its own mark, and whether it says that it asked before."""

    digest: str
    mark: str
    repeated: bool


class RolloutAnswer(UnderWay):
    """One call, with one choice. Only what was answered whole is written down; what broke off was never said."""

    def __init__(
        self,
        gateway: Gateway,
        route: RolloutRoute,
        *,
        choice: Choice,
        contexts: Contexts,
        request: Request,
        parent: RolloutCall | None,
        started_s: float,
    ) -> None:
        super().__init__(gateway, choices=[choice], started_s=started_s, session=route.session_id)
        self._route = route
        self._choice = choice
        self._contexts = contexts
        self._request = request
        self._parent = parent
        self._recorded = False

    @property
    def version(self) -> str:
        """The version that sampled the first token."""
        return self._choice.flight.first_version if self._choice.flight else ""

    async def begin(self) -> None:
        """Get the first token from a replica that holds a version which this rollout may use."""
        try:
            try:
                await self._begin()
            except RouteStale:
                self._route = await self._gateway.rollout_route_anew(self._route)
                await self._begin()
        except RouteStale as error:
            raise OpenAiError(
                503,
                "no replica holds a version that this rollout may use; try again",
                code="no_replica",
                retry_after_s=1,
            ) from error

    async def _begin(self) -> None:
        plan, oldest = self._route.plan, self._route.min_version
        if not self._route.seats:
            raise RouteStale
        body = GenerateBody(
            prompt_token_ids=self._choice.prompt.token_ids,
            sampling=self._choice.prompt.sampling,
            min_version=str(oldest) if oldest else None,
            exact_version=str(plan.exact_version) if plan.exact_version else None,
            return_routes=plan.with_routes,
            session=str(self._route.session_id),
        )
        self._choice.flight = await self._gateway.replicas.begin(
            self._route.seats,
            body,
            affinity=str(self._route.session_id),
            first_token_s=settings.GATEWAY_FIRST_TOKEN_S,
            deadline=self._deadline,
        )

    async def record(self, outcome: GenerationOutcome) -> None:
        """Write the call down. A repeat that was faster stands in its place: then this one was never said either."""
        if self._recorded or outcome != GenerationOutcome.ANSWERED:
            return
        self._recorded = True
        result, prompt = self._choice.result, self._choice.prompt
        assert result is not None
        parts = self._choice.text.said
        captured = Captured(
            number=0,
            messages=prompt.messages,
            prompt_token_ids=prompt.token_ids,
            generated=result,
            text=result.text,
            calls=list(self._choice.text.attempts),
        )
        kept = await in_database(self._write, captured, self._contexts.after(text_of(parts), calls_of(parts)))
        if kept.pk != self._choice.generation_id:
            raise OpenAiError(409, "a repeat of this request was answered meanwhile; ask again", code="repeated")

    def _write(self, captured: Captured, context: str) -> RolloutCall:
        try:
            return call_record(
                session_id=self._route.session_id,
                limits=self._route.plan.limits,
                call_id=self._choice.generation_id,
                captured=captured,
                parent=self._parent,
                request=self._request.digest,
                mark=self._request.mark,
                repeated=self._request.repeated,
                context=context,
                store=open_store(settings.STORE_URL),
            )
        except ControlPlaneError as error:
            refuse(error)

    def _named(self) -> dict[str, str]:
        return {"session": str(self._route.session_id)}


class Replayed(UnderWay):
    """An answer that was given before, given again word for word."""

    def __init__(
        self, gateway: Gateway, route: RolloutRoute, *, choice: Choice, captured: Captured, started_s: float
    ) -> None:
        super().__init__(gateway, choices=[choice], started_s=started_s, session=route.session_id)
        self._choice = choice
        self._captured = captured

    @property
    def version(self) -> str:
        """The version that sampled the first token."""
        return self._captured.generated.spans[0].version

    async def begin(self) -> None:
        """It is there."""

    async def record(self, outcome: GenerationOutcome) -> None:
        """It is written down already."""

    async def events(self) -> AsyncGenerator[tuple[Choice, Event], None]:
        """As they came the first time, without likely alternatives."""
        for event in events_of(self._captured.generated):
            self._choice.take(event, started_s=self._started_s)
            yield self._choice, event
            await asyncio.sleep(0)

    def _named(self) -> dict[str, str]:
        return {}


def events_of(generated: Generated) -> list[Event]:
    """A result as the events that made it."""
    versions = {span.start: span.version for span in generated.spans}
    pairs = zip(generated.token_ids, generated.logprobs, strict=True)
    tokens: list[Event] = [
        TokenEvent(token=token, logprob=logprob, version=versions.get(place, ""))
        for place, (token, logprob) in enumerate(pairs)
    ]
    return [*tokens, EndEvent(result=generated)]


def text_of(parts: Sequence[Part]) -> str:
    """What an answer says, calls left out."""
    return "".join(part for part in parts if isinstance(part, str))


def calls_of(parts: Sequence[Part]) -> list[ToolCall]:
    """The calls that an answer gave to the client."""
    return [part for part in parts if isinstance(part, ToolCall)]


def refuse(error: ControlPlaneError) -> NoReturn:
    """A refusal of the control plane in OpenAI's shape. Raises: OpenAiError."""
    raise OpenAiError(error.http_status, error.message, code=error.code) from error
