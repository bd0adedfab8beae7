"""The way from the event loop to the database and the store: a few threads, and errors that clients understand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from channels.db import DatabaseSyncToAsync
from django.db import InterfaceError, OperationalError
from psycopg_pool import PoolTimeout

from controlplane.gateway.errors import OpenAiError
from rl_core.errors import StoreError

# Fewer than the process's pool has connections: pages and the API keep theirs.
THREADS = 4
RETRY_AFTER_S = 2

T = TypeVar("T")
log = structlog.get_logger(__name__)
_threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="gateway")


async def in_database(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a read or a write. Once begun it runs to its end, also when its caller is cancelled. Raises: OpenAiError."""
    try:
        call = DatabaseSyncToAsync(function, thread_sensitive=False, executor=_threads)
        result: T = await call(*args, **options)
    except (OperationalError, InterfaceError, PoolTimeout, StoreError) as error:
        log.exception("gateway_store_fault", error=type(error).__name__)
        raise OpenAiError(
            503, "the database or the store does not answer; try again", code="unavailable", retry_after_s=RETRY_AFTER_S
        ) from error
    return result
