"""`POST /hooks/v1/{source}`: feedback under a Standard Webhooks signature."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from controlplane.api.problems import headers_of, problem_response
from controlplane.errors import ControlPlaneError, TooLarge, UnsupportedMediaType
from controlplane.services.entries import Receipt, Sender
from controlplane.services.events import Actor
from controlplane.services.gathering import feedback_gathered
from controlplane.services.payloads import MAX_BODY_BYTES
from controlplane.services.rejections import Refused, payloads_reject
from controlplane.services.sources import source_authenticate
from controlplane.states import ActorKind, PayloadKind


@csrf_exempt
@require_POST
def webhook(request: HttpRequest, source: str) -> HttpResponse:
    """Verify the raw body before anything parses it; then the same path as the REST endpoint."""
    try:
        receipt = _receive(request, source)
    except ControlPlaneError as error:
        return problem_response(
            request,
            status=error.http_status,
            code=error.code,
            detail=error.message,
            field=error.field,
            headers=headers_of(error, error.http_status),
        )
    return JsonResponse(receipt.body(), status=receipt.status)


def _receive(request: HttpRequest, slug: str) -> Receipt:
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
    sender = Sender(source.project, source.slug, Actor(ActorKind.API_KEY, f"source {source.slug}"), source)
    outcome = (
        feedback_gathered(sender=sender, body=body)
        if request.content_type == "application/json"
        else UnsupportedMediaType("send application/json")
    )
    if isinstance(outcome, ControlPlaneError):
        payloads_reject(sender=sender, kind=PayloadKind.FEEDBACK, refused=[Refused(body, outcome)])
        raise outcome
    return outcome
