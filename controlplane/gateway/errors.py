"""Errors in OpenAI's shape: `{error: {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class OpenAiError(Exception):
    """What a client is told. `retry_after_s` 0 gives no advice."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The error as an answer."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else None
        return json_response(self.body, status=self.status, headers=headers)


class RouteStale(Exception):
    """No replica holds the version that the route named: the lane was pointed elsewhere, or its replicas moved on."""


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value that msgspec can encode, as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
