"""`/rollouts/v1`: the policy as a remote environment's session meets it, and the callback for the session's result.

The bearer key is one session's, and resolves to its rollout's clusters alone.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence

import msgspec
from django.conf import settings
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from controlplane.errors import ControlPlaneError
from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError, json_response
from controlplane.gateway.requests import ChatRequest, parse_rollout_chat
from controlplane.gateway.responding import body_of, respond
from controlplane.gateway.rollout_calls import Replayed, RolloutAnswer, refuse
from controlplane.gateway.rollout_calls import Request as Asking
from controlplane.gateway.rollout_prompts import Contexts, RolloutPrompt, rollout_prompt, too_long
from controlplane.gateway.shapes import ChatShape, Shape
from controlplane.gateway.state import Gateway, tokenizer_of
from controlplane.gateway.texts import AnswerText
from controlplane.gateway.under_way import Choice, Prompt, UnderWay
from controlplane.models import RolloutCall
from controlplane.selectors.rollout_routes import RolloutRoute
from controlplane.services.remote_results import result_receive
from controlplane.services.rollout_sessions import CallStanding, call_standing
from rl_core.environments.remote.capture import Captured
from rl_core.store import open_store
from rl_core.tool_calls import known_tools
from rl_core.types import SamplingParams

MODEL = "policy"
MAX_MARK = 200
MAX_RESULT_BYTES = 1 << 16


async def chat_completions(request: Request) -> Response:
    """Sample one answer as the run's stage says, and keep its tokens for training."""
    started_s, gateway = time.perf_counter(), Gateway.here()
    route = await gateway.rollout_route(_bearer(request))
    body = await body_of(request)
    asked = parse_rollout_chat(body, model=MODEL)
    asking = _asking(request, body)
    contexts = Contexts(asked)
    beginnings = contexts.beginnings()
    standing, before = await in_database(_standing, route, asking, list(beginnings))
    answering: UnderWay
    if standing.repeats is not None:
        assert before is not None
        said = Prompt(messages=[], token_ids=before.prompt_token_ids, sampling=SamplingParams())
        choice = _choice(route, asked, said)
        choice.generation_id = standing.repeats.pk
        answering = Replayed(gateway, route, choice=choice, captured=before, started_s=started_s)
    else:
        known = beginnings[standing.parent.context] if standing.parent else 0
        prompt = await rollout_prompt(asked, tokenizer_of(route.plan.model_folder), parent=before, known=known)
        sampling = _sampling(route, asked, prompt, standing)
        read = Prompt(messages=prompt.messages, token_ids=prompt.token_ids, sampling=sampling)
        answering = RolloutAnswer(
            gateway,
            route,
            choice=_choice(route, asked, read),
            contexts=contexts,
            request=asking,
            parent=standing.parent if prompt.continues else None,
            started_s=started_s,
        )
    strings = tokenizer_of(route.plan.model_folder).token_strings

    def shape(identity: uuid.UUID, version: str) -> Shape:
        return ChatShape(
            identity=identity,
            model=MODEL,
            version=version,
            strings=strings,
            logprobs=bool(asked.logprobs),
            usage_in_stream=asked.usage_in_stream,
        )

    return await respond(request, asked, answering, shape, logprobs=bool(asked.logprobs))


async def models(request: Request) -> Response:
    """The one model that a session has."""
    await Gateway.here().rollout_route(_bearer(request))
    entry = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "rollout"}
    return json_response({"object": "list", "data": [entry]})


async def result(request: Request) -> Response:
    """A session's result, signed by its environment: the key says nothing here, what the policy runs may have it."""
    session_id: uuid.UUID = request.path_params["session"]
    body = await body_of(request, max_bytes=MAX_RESULT_BYTES)
    headers = {name.lower(): value for name, value in request.headers.items()}
    new = await in_database(_receive, session_id, headers, body)
    return json_response({"version": 1, "duplicate": not new})


def _receive(session_id: uuid.UUID, headers: dict[str, str], body: bytes) -> bool:
    try:
        return result_receive(session_id=session_id, headers=headers, body=body)
    except ControlPlaneError as error:
        refuse(error)


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise OpenAiError(401, "send the session's key as a bearer token", code="invalid_api_key")
    return token.strip()


def _asking(request: Request, body: bytes) -> Asking:
    mark = request.headers.get("Idempotency-Key", "")
    if len(mark) > MAX_MARK:
        raise OpenAiError(400, f"Idempotency-Key has at most {MAX_MARK} characters", code="invalid_value")
    retries = request.headers.get("X-Stainless-Retry-Count", "")  # what OpenAI's own clients count
    return Asking(digest=hashlib.sha256(body).hexdigest(), mark=mark, repeated=retries.isdecimal() and int(retries) > 0)


def _standing(route: RolloutRoute, asking: Asking, contexts: Sequence[str]) -> tuple[CallStanding, Captured | None]:
    """What the call meets, with the call that it repeats or goes on from."""
    try:
        standing = call_standing(
            session_id=route.session_id,
            request=asking.digest,
            mark=asking.mark,
            repeated=asking.repeated,
            contexts=contexts,
        )
    except ControlPlaneError as error:
        refuse(error)
    before: RolloutCall | None = standing.repeats or standing.parent
    if before is None:
        return standing, None
    return standing, Captured.from_bytes(open_store(settings.STORE_URL).get_blob(before.blob_key))


def _choice(route: RolloutRoute, asked: ChatRequest, prompt: Prompt) -> Choice:
    known = known_tools(asked.offered) if asked.offered else None
    tokenizer = tokenizer_of(route.plan.model_folder)
    return Choice(
        index=0,
        prompt=prompt,
        text=AnswerText(tokenizer, stops=asked.stops, known=known, opening=asked.opening),
    )


def _sampling(route: RolloutRoute, asked: ChatRequest, prompt: RolloutPrompt, standing: CallStanding) -> SamplingParams:
    """As the run's stage says, whatever the client asked for: lengths and stop strings alone are the client's.

    Raises: OpenAiError 400 past a limit of the rollout.
    """
    limits, plan = route.plan.limits, route.plan.sampling
    if standing.calls >= limits.max_turns:
        raise OpenAiError(400, f"this rollout has {limits.max_turns} calls, and they are made", code="turn_limit")
    room = limits.max_context_tokens - len(prompt.token_ids)
    if room < 1:
        raise too_long(len(prompt.token_ids), limits.max_context_tokens)
    if limits.max_sampled_tokens:
        room = min(room, limits.max_sampled_tokens - standing.sampled_tokens)
        if room < 1:
            raise OpenAiError(400, "this rollout has sampled as many tokens as it may", code="token_limit")
    wanted = asked.sampling_of(0)
    limit = min(room, wanted.max_tokens, plan.max_tokens)
    return msgspec.structs.replace(plan, max_tokens=limit, stop=(*plan.stop, *wanted.stop), seed=None)


ROUTES = [
    Route("/rollouts/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/rollouts/v1/models", models, methods=["GET"]),
    Route("/rollouts/v1/sessions/{session:uuid}/result", result, methods=["POST"]),
]
