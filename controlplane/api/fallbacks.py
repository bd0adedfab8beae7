"""Answers to requests that no view took: problem+json under the API's paths, Django's pages elsewhere."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse
from django.views import defaults

from controlplane.api.problems import problem_response

_MACHINE_PATHS = ("/api/", "/hooks/")


def _for_machines(request: HttpRequest) -> bool:
    return request.path.startswith(_MACHINE_PATHS)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """400, or 413 for a body over the limit."""
    if not _for_machines(request):
        return defaults.bad_request(request, exception)
    if isinstance(exception, RequestDataTooBig):
        return problem_response(request, status=413, code="too_large", detail="the body is over its limit")
    return problem_response(request, status=400, code="bad_request", detail="the request is malformed")


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """403."""
    if not _for_machines(request):
        return defaults.permission_denied(request, exception)
    return problem_response(request, status=403, code="forbidden", detail="you may not do this")


def not_found(request: HttpRequest, exception: Exception | None = None, **_: Any) -> HttpResponse:
    """404."""
    if not _for_machines(request):
        return defaults.page_not_found(request, exception or Exception("not found"))
    return problem_response(request, status=404, code="not_found", detail="there is no such endpoint")


def server_error(request: HttpRequest) -> HttpResponse:
    """500: a bug. The request id finds its traceback in the logs."""
    if not _for_machines(request):
        return defaults.server_error(request)
    return problem_response(request, status=500, code="internal", detail="an unexpected error; quote the request id")
