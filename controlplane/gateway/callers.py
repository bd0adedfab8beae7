"""Who calls, by the headers: the key, the user, the session, the user's segment, and what the user allows."""

from __future__ import annotations

import re

from starlette.requests import Request

from controlplane.gateway.answering import Caller
from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.requests import KEY_CHARACTERS
from controlplane.gateway.state import Gateway
from controlplane.models import ApiKey
from controlplane.permissions import Action, allowed
from controlplane.states import Consent

SEGMENT = re.compile(r"[A-Za-z0-9._-]{0,64}")


async def key_of(request: Request, gateway: Gateway) -> ApiKey:
    """The key of the bearer token. Raises: OpenAiError 401, 403."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = await gateway.key(token.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise OpenAiError(401, "send a gateway key as a bearer token", code="invalid_api_key")
    if not allowed(key.scopes, Action.GATEWAY_CALL):
        raise OpenAiError(403, "this key has no gateway scope", code="forbidden")
    return key


def caller_of(request: Request, *, user: str) -> Caller:
    """The user by the header, else by the body's `user`. Raises: OpenAiError 400, naming the header."""
    return Caller(
        user_key=_header(request, "X-Slipway-User") or user,
        session=_header(request, "X-Slipway-Session"),
        segment=_segment(request),
        consent=_consent(request),
    )


def _header(request: Request, name: str) -> str:
    """A header as UTF-8, so that a key means the same here and in a call to erase it."""
    try:
        value = request.headers.get(name, "").encode("latin-1").decode()
    except UnicodeError as error:
        raise OpenAiError(400, f"{name} is not UTF-8", code="invalid_value", param=name) from error
    if len(value) > KEY_CHARACTERS:
        raise OpenAiError(400, f"{name} has over {KEY_CHARACTERS} characters", code="invalid_value", param=name)
    if not value.isprintable():
        raise OpenAiError(400, f"{name} has control characters", code="invalid_value", param=name)
    return value


def _segment(request: Request) -> str:
    """A name, not a text: it is kept without consent, and there should be a handful of them."""
    value, name = _header(request, "X-Slipway-Segment"), "X-Slipway-Segment"
    if not SEGMENT.fullmatch(value):
        known = "at most 64 letters, digits, dots, dashes and underscores"
        raise OpenAiError(400, f"{name} takes {known}", code="invalid_value", param=name)
    return value


def _consent(request: Request) -> Consent:
    value = _header(request, "X-Slipway-Consent") or Consent.NONE
    if value not in Consent.values:
        known = ", ".join(Consent.values)
        raise OpenAiError(400, f"X-Slipway-Consent is one of {known}", code="invalid_value", param="X-Slipway-Consent")
    return Consent(value)
