"""HTTP of the gateway: `POST /v1/chat/completions`, `GET /v1/models`. Any OpenAI client is a client."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from controlplane.gateway import lane as lanes
from controlplane.gateway.openai import OpenAiError, chat_answer, parse_chat
from controlplane.models import ApiKey, Lane
from controlplane.permissions import Action, allowed
from controlplane.services.tenancy import api_key_authenticate
from controlplane.states import Consent

log = structlog.get_logger(__name__)

View = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]
HEADER_CHARACTERS = 200


def openai_errors(view: View) -> View:
    """Answer errors in OpenAI's shape."""

    @functools.wraps(view)
    async def wrapped(request: HttpRequest) -> HttpResponse:
        try:
            return await view(request)
        except OpenAiError as error:
            response = JsonResponse(error.body, status=error.status)
            if error.retry_after_s:
                response["Retry-After"] = str(error.retry_after_s)
            return response

    return wrapped


async def _gateway_key(request: HttpRequest) -> ApiKey:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = await sync_to_async(api_key_authenticate)(token=token.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise OpenAiError(401, "send a gateway key as a bearer token", code="invalid_api_key")
    if not allowed(key.scopes, Action.GATEWAY_CALL):
        raise OpenAiError(403, "this key has no gateway scope", code="forbidden")
    return key


def _header(request: HttpRequest, name: str) -> str:
    value = request.headers.get(name, "")
    if len(value) > HEADER_CHARACTERS:
        raise OpenAiError(400, f"{name} has over {HEADER_CHARACTERS} characters", code="invalid_value", param=name)
    return value


def _consent(request: HttpRequest) -> Consent:
    value = _header(request, "X-Slipway-Consent") or Consent.NONE
    if value not in Consent.values:
        known = ", ".join(Consent.values)
        raise OpenAiError(400, f"X-Slipway-Consent is one of {known}", code="invalid_value", param="X-Slipway-Consent")
    return Consent(value)


@csrf_exempt
@require_POST
@openai_errors
async def chat_completions(request: HttpRequest) -> HttpResponse:
    """Answer with the lane's promoted version and record the generation, whose id the answer carries."""
    started_s = time.perf_counter()
    key = await _gateway_key(request)
    asked = parse_chat(request.body)
    user_key, session = _header(request, "X-Slipway-User"), _header(request, "X-Slipway-Session")
    consent = _consent(request)
    route = await sync_to_async(lanes.lane_route)(project=key.project, model=asked.model)
    messages, prompt = await sync_to_async(lanes.prompt_of)(route=route, request=asked)
    generated = await lanes.generate(route=route, prompt=prompt, request=asked)
    generation = await sync_to_async(lanes.record)(
        route=route,
        messages=messages,
        prompt=prompt,
        generated=generated,
        request=asked,
        started_s=started_s,
        user_key=user_key or asked.user or "",
        session=session,
        consent=consent,
    )
    strings = lanes.tokenizer_of(route.lane.model.folder).token_strings if asked.logprobs else None
    answer = chat_answer(
        generation_id=generation.id,
        model=route.lane.slug,
        version=str(route.version),
        generated=generated,
        tokens=[strings[token] for token in generated.token_ids] if strings else None,
    )
    log.info("generation_served", lane=route.lane.slug, generation=str(generation.id), tokens=len(generated.token_ids))
    return JsonResponse(answer)


@csrf_exempt
@require_GET
@openai_errors
async def models(request: HttpRequest) -> HttpResponse:
    """The project's lanes, as models."""
    key = await _gateway_key(request)
    rows = [row async for row in Lane.objects.filter(project=key.project).order_by("slug")]
    data = [
        {"id": row.slug, "object": "model", "created": int(row.created_at.timestamp()), "owned_by": key.project.slug}
        for row in rows
    ]
    return JsonResponse({"object": "list", "data": data})
