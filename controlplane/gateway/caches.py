"""Values that may be a moment old, so that nothing waits for the database while it is asked about the same thing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    value: V
    asked_at: float


class FreshCache(Generic[K, V]):
    """Loads by key, one load at a time for each. For one event loop.

    Up to `fresh_s` a value is given as it is; up to `max_age_s` too, while it is loaded again in the background; then
    callers wait. Ages count from when the load was asked for: what changed before that is always seen. What does not
    exist (None) is not kept.
    """

    def __init__(
        self, load: Callable[[K], Awaitable[V | None]], *, fresh_s: float, max_age_s: float, capacity: int = 1024
    ) -> None:
        self._load = load
        self._fresh_s, self._max_age_s, self._capacity = fresh_s, max_age_s, capacity
        self._entries: dict[K, _Entry[V]] = {}
        self._loads: dict[K, asyncio.Task[V | None]] = {}

    async def get(self, key: K) -> V | None:
        """The value. Raises: what the load raises, when there is no value young enough."""
        entry = self._entries.get(key)
        age_s = time.monotonic() - entry.asked_at if entry else 0.0
        if entry and age_s <= self._fresh_s:
            return entry.value
        load = self._loads.get(key) or self._begin(key)
        if entry and age_s <= self._max_age_s:
            return entry.value
        return await asyncio.shield(load)  # another caller may wait for it too

    def drop(self, key: K) -> None:
        """Forget a value that proved to be wrong."""
        self._entries.pop(key, None)
        self._loads.pop(key, None)

    def _begin(self, key: K) -> asyncio.Task[V | None]:
        asked_at = time.monotonic()

        async def run() -> V | None:
            return await self._load(key)

        def done(task: asyncio.Task[V | None]) -> None:
            current = self._loads.get(key) is task
            if current:
                del self._loads[key]
            if task.cancelled() or task.exception() is not None or not current:
                return
            self._keep(key, task.result(), asked_at)

        task = asyncio.create_task(run())
        self._loads[key] = task
        task.add_done_callback(done)
        return task

    def _keep(self, key: K, value: V | None, asked_at: float) -> None:
        self._entries.pop(key, None)
        if value is None:
            return
        self._entries[key] = _Entry(value, asked_at)
        while len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]
