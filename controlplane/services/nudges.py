"""Tells subscribers that a topic moved. Losing a nudge loses time, never an event: whoever listens also looks by timer.

Sending is left to a thread with an event loop of its own, one a process, so that no commit waits for the channel layer
and its connection is kept.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import structlog
from channels.layers import get_channel_layer
from redis.exceptions import RedisError

log = structlog.get_logger(__name__)

MAX_WAITING = 1000


def group_name(topic: str) -> str:
    """The channel layer's name for a topic's subscribers."""
    return "topic." + topic.replace(":", ".")


class _Sender:
    """The thread. A forked child makes its own, because threads do not survive a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0

    def send(self, topic: str, seq: int) -> None:
        """Hand a nudge to the thread; dropped when it is far behind, since the newest ones say enough."""
        loop = self._started()
        if self._waiting < MAX_WAITING:
            self._waiting += 1
            asyncio.run_coroutine_threadsafe(self._send(topic, seq), loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid, self._waiting = asyncio.new_event_loop(), os.getpid(), 0
                threading.Thread(target=self._loop.run_forever, name="nudges", daemon=True).start()
            return self._loop

    async def _send(self, topic: str, seq: int) -> None:
        layer: Any = get_channel_layer()
        try:
            await layer.group_send(group_name(topic), {"type": "topic.changed", "topic": topic, "seq": seq})
        except (OSError, RedisError) as error:
            log.warning("nudge_lost", topic=topic, seq=seq, error=str(error)[:200])
        finally:
            self._waiting -= 1


_sender = _Sender()


def topic_nudge(topic: str, seq: int) -> None:
    """Tell whoever listens that the topic stands at `seq`."""
    _sender.send(topic, seq)
