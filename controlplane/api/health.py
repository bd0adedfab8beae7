"""Whether this process can do its work: `GET /healthz`, for supervisors and load balancers."""

from __future__ import annotations

import structlog
from django.db import DatabaseError, connection
from django.http import HttpRequest, JsonResponse
from psycopg_pool import PoolTimeout

log = structlog.get_logger(__name__)


def healthz(request: HttpRequest) -> JsonResponse:
    """200 when the database answers, 503 when it does not."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            cursor.fetchone()
    except (DatabaseError, PoolTimeout) as error:
        log.warning("database_down", error=str(error))
        return JsonResponse({"status": "unavailable", "database": "down"}, status=503)
    return JsonResponse({"status": "ok", "database": "up"})
