"""HTTP of the gateway: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. Any OpenAI client is a client.

An application of its own beside Django's: an answer needs no sessions, cookies and pages, and its first token must not
wait for them.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from controlplane.gateway import rollouts
from controlplane.gateway.answering import Answering
from controlplane.gateway.callers import caller_of, key_of
from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError, json_response
from controlplane.gateway.prompts import chat_prompt, completion_prompts
from controlplane.gateway.request_ids import RequestIds
from controlplane.gateway.requests import parse_chat, parse_completion
from controlplane.gateway.responding import body_of, respond
from controlplane.gateway.shapes import ChatShape, CompletionShape, Shape
from controlplane.gateway.state import Gateway
from controlplane.gateway.texts import AnswerText
from controlplane.gateway.under_way import Choice, Prompt
from controlplane.models import ApiKey, Lane
from rl_core.tool_calls import known_tools


async def chat_completions(request: Request) -> Response:
    """Answer a conversation with the version that the lane's arm of this user serves."""
    started_s, gateway = time.perf_counter(), Gateway.here()
    key = await key_of(request, gateway)
    asked = parse_chat(await body_of(request))
    caller = caller_of(request, user=asked.user_key)
    route = await gateway.route(project_id=key.project_id, slug=asked.model)
    tokenizer = gateway.tokenizer(route)
    prompt = await chat_prompt(asked, tokenizer, system_prompt=route.lane.system_prompt)
    known = known_tools(asked.offered) if asked.offered else None
    choices = [
        Choice(
            index=index,
            prompt=Prompt(messages=prompt.messages, token_ids=prompt.token_ids, sampling=asked.sampling_of(index)),
            text=AnswerText(tokenizer, stops=asked.stops, known=known, opening=asked.opening),
        )
        for index in range(asked.choices)
    ]

    def shape(identity: uuid.UUID, version: str) -> Shape:
        return ChatShape(
            identity=identity,
            model=asked.model,
            version=version,
            strings=tokenizer.token_strings,
            logprobs=bool(asked.logprobs),
            usage_in_stream=asked.usage_in_stream,
        )

    answering = Answering(
        gateway,
        route,
        caller=caller,
        choices=choices,
        top_logprobs=asked.top_logprobs or 0,
        started_s=started_s,
    )
    return await respond(request, asked, answering, shape, logprobs=bool(asked.logprobs))


async def completions(request: Request) -> Response:
    """Go on from texts or tokens, without the lane's prompt."""
    started_s, gateway = time.perf_counter(), Gateway.here()
    key = await key_of(request, gateway)
    asked = parse_completion(await body_of(request))
    caller = caller_of(request, user=asked.user_key)
    route = await gateway.route(project_id=key.project_id, slug=asked.model)
    tokenizer = gateway.tokenizer(route)
    prompts = await completion_prompts(asked, tokenizer)
    wanted = [(prompt, choice) for prompt in prompts for choice in range(asked.choices)]
    choices = [
        Choice(
            index=index,
            prompt=Prompt(messages=prompt.messages, token_ids=prompt.token_ids, sampling=asked.sampling_of(choice)),
            text=AnswerText(tokenizer, stops=asked.stops, known=None, opening=""),
        )
        for index, (prompt, choice) in enumerate(wanted)
    ]

    def shape(identity: uuid.UUID, version: str) -> Shape:
        return CompletionShape(
            identity=identity,
            model=asked.model,
            version=version,
            strings=tokenizer.token_strings,
            logprobs=asked.logprobs is not None,
            usage_in_stream=asked.usage_in_stream,
        )

    answering = Answering(
        gateway, route, caller=caller, choices=choices, top_logprobs=asked.logprobs or 0, started_s=started_s
    )
    return await respond(request, asked, answering, shape, logprobs=asked.logprobs is not None)


async def models(request: Request) -> Response:
    """The project's lanes, as models."""
    key = await key_of(request, Gateway.here())
    return json_response({"object": "list", "data": await in_database(_models, key)})


async def model(request: Request) -> Response:
    """One lane, as a model."""
    key = await key_of(request, Gateway.here())
    slug = request.path_params["slug"]
    for entry in await in_database(_models, key):
        if entry["id"] == slug:
            return json_response(entry)
    raise OpenAiError(404, f"no lane {slug[:80]!r} in this project", code="model_not_found", param="model")


def _models(key: ApiKey) -> list[dict[str, Any]]:
    return [
        {"id": row.slug, "object": "model", "created": int(row.created_at.timestamp()), "owned_by": key.project.slug}
        for row in Lane.objects.filter(project=key.project_id).order_by("slug")
    ]


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OpenAiError)
    return error.response()


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    answer = OpenAiError(error.status_code, str(error.detail), code=code).response()
    answer.headers.update(error.headers or {})
    return answer


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_fault(_: Request, __: Exception) -> Response:
    """A bug: the server logs its traceback."""
    return OpenAiError(500, "the gateway failed; see its log by the request's id", code="internal_error").response()


application = Starlette(
    routes=[
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{slug}", model, methods=["GET"]),
        *rollouts.ROUTES,
    ],
    middleware=[Middleware(RequestIds)],
    exception_handlers={
        OpenAiError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_fault,
    },
)
