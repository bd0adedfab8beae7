"""`POST /hooks/v1/{source}`: feedback under a Standard Webhooks signature."""

from __future__ import annotations

import json

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from controlplane.api.problems import problem_response
from controlplane.errors import ControlPlaneError, Invalid, TooLarge
from controlplane.services.events import Actor
from controlplane.services.feedback import MAX_BODY_BYTES, feedback_receive, payload_reject
from controlplane.services.sources import source_authenticate
from controlplane.states import ActorKind


class Malformed(ControlPlaneError):
    """The body is not JSON."""

    code = "malformed"
    http_status = 400


class UnsupportedMediaType(ControlPlaneError):
    """The body is of another media type than JSON."""

    code = "unsupported_media_type"
    http_status = 415


@csrf_exempt
@require_POST
def webhook(request: HttpRequest, source: str) -> HttpResponse:
    """Verify the raw body before anything parses it; then the same path as the REST endpoint."""
    try:
        return _receive(request, source)
    except ControlPlaneError as error:
        return problem_response(
            request, status=error.http_status, code=error.code, detail=error.message, field=error.field
        )


def _receive(request: HttpRequest, slug: str) -> HttpResponse:
    if int(request.headers.get("Content-Length") or 0) > MAX_BODY_BYTES:
        raise TooLarge(f"a webhook's body is at most {MAX_BODY_BYTES} bytes")
    body = request.body
    if len(body) > MAX_BODY_BYTES:
        raise TooLarge(f"a webhook's body is at most {MAX_BODY_BYTES} bytes")
    source = source_authenticate(
        slug=slug,
        message_id=request.headers.get("webhook-id", ""),
        timestamp=request.headers.get("webhook-timestamp", ""),
        signature=request.headers.get("webhook-signature", ""),
        body=body,
    )
    actor = Actor(ActorKind.API_KEY, f"source {source.slug}")
    try:
        data = _parse(request, body)
        receipt = feedback_receive(project=source.project, sender=source.slug, source=source, data=data, actor=actor)
    except ControlPlaneError as error:
        payload_reject(project=source.project, sender=source.slug, body=body, error=error, actor=actor)
        raise
    return JsonResponse(receipt.body(), status=receipt.status)


def _parse(request: HttpRequest, body: bytes) -> object:
    if request.content_type != "application/json":
        raise UnsupportedMediaType("send application/json")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {str(error)[:200]}") from error


def _refuse(name: str) -> object:
    raise Invalid(f"{name} is no JSON number")
