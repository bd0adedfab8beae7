"""Nudges from the channel layer, one listener for all connections of a process.

The layer may be down, come back, or die silently (after a broker is killed its sockets can stay open and get
nothing). Losing nudges loses time alone, so the hub only tries again; whoever finds by timer what no nudge announced
asks for a fresh start. The hub alone uses the layer in its event loop, which makes `flush` safe. The hub's task ends
by itself when nobody listens: `flush` swallows a cancellation, so a task that was cancelled might never end.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import structlog
from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from controlplane.services.nudges import group_name

log = structlog.get_logger(__name__)

RETRY_S = 2.0
RESTART_PAUSE_S = 30.0
OnNudge = Callable[[str], None]


class NudgeHub:
    """Calls `on_nudge(topic)` for each nudge about a topic that was joined, and once when listening begins."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[OnNudge]] = defaultdict(set)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._restarted_at = time.monotonic()
        self._stale = False

    def join(self, topic: str, on_nudge: OnNudge) -> None:
        """Hear of the topic."""
        self._listeners[topic].add(on_nudge)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def leave(self, topic: str, on_nudge: OnNudge) -> None:
        """Hear of it no longer; when the last one leaves the listening ends."""
        self._listeners[topic].discard(on_nudge)
        if not self._listeners[topic]:
            del self._listeners[topic]
            self._changed.set()

    def suspect(self) -> None:
        """Something was committed that no nudge announced: begin anew, unless that was done a moment ago."""
        if time.monotonic() - self._restarted_at > RESTART_PAUSE_S:
            log.warning("nudges_lost")
            self._restarted_at = time.monotonic()
            self._stale = True
            self._changed.set()

    async def _run(self) -> None:
        while (layer := get_channel_layer()) is not None:
            try:
                await _flush(layer)
                if not self._listeners:
                    return  # nothing is awaited since the look: whoever joins finds a task that is done
                await self._listen(layer)
            except (OSError, RedisError) as error:
                log.warning("nudges_unavailable", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _listen(self, layer: Any) -> None:
        """Pass on nudges until nobody listens or the channel is suspected."""
        self._stale = False
        channel = await layer.new_channel()
        joined: set[str] = set()
        receiving: asyncio.Task[dict[str, Any]] | None = None
        waiting: asyncio.Task[Any] | None = None
        try:
            while self._listeners and not self._stale:
                self._changed.clear()
                await self._follow(layer, channel, joined)
                receiving = receiving or asyncio.create_task(layer.receive(channel))
                waiting = waiting or asyncio.create_task(self._changed.wait())
                done, _ = await asyncio.wait({receiving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting in done:
                    waiting = None
                if receiving in done:
                    self._tell(str(receiving.result().get("topic", "")))
                    receiving = None
        finally:
            for task in (receiving, waiting):
                if task is not None:
                    task.cancel()

    async def _follow(self, layer: Any, channel: str, joined: set[str]) -> None:
        """Make the layer's groups those that are wanted."""
        wanted = set(self._listeners)
        for topic in wanted - joined:
            await layer.group_add(group_name(topic), channel)
            joined.add(topic)
            self._tell(topic)  # what was committed while nobody listened
        for topic in joined - wanted:
            await layer.group_discard(group_name(topic), channel)
            joined.discard(topic)

    def _tell(self, topic: str) -> None:
        for on_nudge in list(self._listeners.get(topic, ())):
            on_nudge(topic)


async def _flush(layer: Any) -> None:
    """End the layer's receiver and connections. Raises: CancelledError, which the layer takes for its receiver's."""
    await layer.flush()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, NudgeHub] = weakref.WeakKeyDictionary()


def nudge_hub() -> NudgeHub:
    """The hub of the running event loop."""
    loop = asyncio.get_running_loop()
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = NudgeHub()
    return hub
