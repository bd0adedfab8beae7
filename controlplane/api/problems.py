"""Errors as `application/problem+json`: {type, title, status, code, field, request_id, detail}.

One of the two places where errors are translated; the other is the workers' task base.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from django.core.exceptions import PermissionDenied
from django.db import DataError, IntegrityError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, JsonResponse
from psycopg.errors import UniqueViolation
from psycopg_pool import PoolTimeout
from rest_framework import exceptions
from rest_framework.response import Response

from controlplane.errors import ControlPlaneError
from controlplane.middleware import request_id_of
from rl_core import errors as core

log = structlog.get_logger(__name__)

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER_S = 5

_CORE_STATUS: tuple[tuple[type[core.RlCoreError], int], ...] = (
    (core.SpecError, 422),
    (core.TaskSetError, 422),
    (core.ModelError, 422),
    (core.ObjectMissing, 404),
    (core.StoreError, 503),
    (core.DigestMismatch, 503),
)


def problem(*, status: int, code: str, detail: str, request_id: str, field: str = "") -> dict[str, Any]:
    """The body of an error answer."""
    return {
        "type": f"urn:slipway:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "field": field,
        "request_id": request_id,
        "detail": detail,
    }


def problem_response(
    request: HttpRequest, *, status: int, code: str, detail: str, field: str = "", headers: dict[str, str] | None = None
) -> JsonResponse:
    """An error answer from outside REST framework's views: fallbacks, webhooks."""
    body = problem(status=status, code=code, detail=detail, field=field, request_id=request_id_of(request))
    return JsonResponse(body, status=status, content_type=CONTENT_TYPE, headers=headers)


def problem_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """REST framework's exception handler. None (an unknown error) goes on to Django, which answers 500 and logs."""
    request = context["request"]
    found = _describe(error)
    if found is None:
        return None
    status, code, detail, field = found
    headers = headers_of(error, status)
    body = problem(status=status, code=code, detail=detail, field=field, request_id=request_id_of(request._request))
    if status >= 500:
        log.warning("request_failed", code=code, status=status, error=str(error))
    return Response(body, status=status, headers=headers, content_type=CONTENT_TYPE)


def _describe(error: Exception) -> tuple[int, str, str, str] | None:
    """(status, code, detail, field) of an error that is expected."""
    if isinstance(error, ControlPlaneError):
        return error.http_status, error.code, error.message, error.field
    if isinstance(error, core.RlCoreError):
        status = next((status for kind, status in _CORE_STATUS if isinstance(error, kind)), None)
        return None if status is None else (status, error.code, str(error), "")
    if isinstance(error, exceptions.ValidationError):
        field, detail, code = _first_problem(error.detail, error.get_codes())
        return 422, code, detail, field
    if isinstance(error, exceptions.APIException):
        return error.status_code, str(getattr(error.detail, "code", error.default_code)), str(error.detail), ""
    if isinstance(error, Http404):
        return 404, "not_found", "there is nothing here that you may see", ""
    if isinstance(error, PermissionDenied):
        return 403, "forbidden", "you may not do this", ""
    if isinstance(error, IntegrityError) and isinstance(error.__cause__, UniqueViolation):
        return 409, "conflict", "somebody else created the same thing just now; read it, then try again", ""
    if isinstance(error, DataError):
        return 422, "invalid", "a value is out of the range that the database can hold", ""
    if isinstance(error, (OperationalError, InterfaceError, PoolTimeout)):
        return 503, "unavailable", "the database does not answer; try again in a few seconds", ""
    return None


def _first_problem(detail: Any, codes: Any, path: str = "") -> tuple[str, str, str]:
    """(field path, message, code) of the first complaint in REST framework's nested form."""
    if isinstance(detail, dict):
        key = next(iter(detail))
        inner = path if key == "non_field_errors" else f"{path}.{key}" if path else str(key)
        return _first_problem(detail[key], codes[key], inner)
    if isinstance(detail, list):
        for index, item in enumerate(detail):
            if isinstance(item, (dict, list)):
                if item:
                    return _first_problem(item, codes[index], f"{path}.{index}" if path else str(index))
                continue
            return path, str(item), str(codes[index])
    return path, str(detail), str(codes)


def headers_of(error: Exception, status: int) -> dict[str, str]:
    """Headers that go with an error's answer: who to be, and when to come back."""
    headers: dict[str, str] = {}
    authenticate = getattr(error, "auth_header", None)
    if authenticate:
        headers["WWW-Authenticate"] = authenticate
    wait = getattr(error, "wait", None)
    if wait:
        headers["Retry-After"] = str(int(wait) + 1)
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return headers
