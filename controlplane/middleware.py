"""Middleware of every HTTP answer: a request id, and a strict content security policy."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import structlog
from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse

GetResponse = Callable[[HttpRequest], HttpResponse]

REQUEST_ID_HEADER = "X-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id_from(given: str) -> str:
    """The id that the caller gave when it is well-formed, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def request_id_of(request: HttpRequest) -> str:
    """The request's id; made up on the spot where the middleware did not run."""
    present: str = getattr(request, "request_id", "")
    return present or uuid.uuid4().hex


class RequestIdMiddleware:
    """Takes a well-formed `X-Request-ID` or makes one, binds it to the logs, and returns it."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Name the request, answer it."""
        request_id = request_id_from(request.headers.get(REQUEST_ID_HEADER, ""))
        request.request_id = request_id  # type: ignore[attr-defined]
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            response = self.get_response(request)
        response[REQUEST_ID_HEADER] = request_id
        return response


def content_security_policy(host: str) -> str:
    """The policy for pages served from `host` (empty: unknown).

    Nothing from elsewhere, no inline script, no eval. Styles may be inline because plotly's full bundle injects them.
    The websocket's origins are named beside 'self', which older browsers do not extend to ws: and wss:.
    """
    sockets = f" ws://{host} wss://{host}" if host else ""
    return "; ".join(
        [
            "default-src 'self'",
            "script-src 'self'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self'",
            f"connect-src 'self'{sockets}",
            "object-src 'none'",
            "frame-ancestors 'none'",
            "base-uri 'self'",
            "form-action 'self'",
        ]
    )


class ContentSecurityPolicyMiddleware:
    """Sends the policy with every answer."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer, with the header."""
        response = self.get_response(request)
        try:
            host = request.get_host()
        except DisallowedHost:  # answered with 400 already
            host = ""
        response["Content-Security-Policy"] = content_security_policy(host)
        return response
