"""`/ws/v1/live`: events as they are committed, in order, none missed and none invented.

The client sends `{"v":1,"subscribe":[{"topic":"run:…","last_seq":12}]}` (`last_seq` null: from now on) or
`{"v":1,"unsubscribe":["run:…"]}`. The server sends envelopes `{v,topic,seq,type,ts,data}`: events, and of its own
`stream.subscribed`, `stream.reset` (the client was ahead of the log) and `stream.error`.

One task per connection reads what is new from PostgreSQL, from the last `seq` it sent, whenever the channel layer
nudges, a timer fires or a subscription begins. Nudges carry nothing that is shown, so losing them all costs at most
one interval; what is sent is what the log holds after the last `seq`, so there is no gap to detect. A client that
reads slowly holds back its own task alone, with one page in memory, and is dropped when a send takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

import structlog
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import InterfaceError, OperationalError
from django.utils import timezone
from psycopg_pool import PoolTimeout

from controlplane.live.messages import BadMessage, Request, parse_request
from controlplane.live.nudges import nudge_hub
from controlplane.live.reading import Credentials, page_read, principal_read, topic_read
from controlplane.principals import Principal
from controlplane.selectors.api_events import ENVELOPE_VERSION

log = structlog.get_logger(__name__)
T = TypeVar("T")

INTERVAL_S = 10.0
COALESCE_S = 0.1  # a burst of events costs one read
PAGE = 200
MAX_TOPICS = 64
MAX_BAD_MESSAGES = 5
SEND_TIMEOUT_S = 20.0
DATABASE_ERRORS = (OperationalError, InterfaceError, PoolTimeout)


class Close(IntEnum):
    """Why the server closes."""

    POLICY = 1008  # repeated bad messages
    BUG = 1011
    TRY_LATER = 1013  # the client did not read, or the database does not answer
    UNAUTHENTICATED = 4401


class StreamType(StrEnum):
    """Envelopes of the stream itself."""

    SUBSCRIBED = "stream.subscribed"
    UNSUBSCRIBED = "stream.unsubscribed"
    RESET = "stream.reset"
    ERROR = "stream.error"


class Gone(Exception):
    """The connection is closed, by either side: there is nobody to send to. `disconnect` follows."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One topic and the last `seq` that was sent. Subscribing again makes a new one."""

    topic: str
    last_seq: int


class LiveConsumer(AsyncWebsocketConsumer):
    """One connection."""

    # channels' own subscription fails the handshake while Redis is down; the hub tries again instead.
    channel_layer_alias = ""

    def __init__(self, *, interval_s: float = INTERVAL_S, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__()
        self.interval_s = interval_s
        self.send_timeout_s = send_timeout_s
        self.subscriptions: dict[str, Subscription] = {}
        self.bad_messages = 0
        self.closing = False
        self.dirty: set[str] = set()
        self.wake = asyncio.Event()
        self.pump: asyncio.Task[None] | None = None
        self.principal: Principal | None = None

    async def connect(self) -> None:
        """Accept, and start the connection's task for a known caller."""
        self.credentials = Credentials.of(self.scope)
        self.hub = nudge_hub()
        self.on_nudge = self._nudged  # one object, so that leaving finds what joined
        await self.accept()
        try:
            self.principal = await _database(principal_read, self.credentials)
        except DATABASE_ERRORS:
            await self.close(Close.TRY_LATER)
            return
        if self.principal is None:
            await self.close(Close.UNAUTHENTICATED)
            return
        self.pump = asyncio.create_task(self._pump())

    async def disconnect(self, code: int) -> None:
        """End the connection's task."""
        for topic in list(self.subscriptions):
            self._drop(topic)
        if self.pump is not None:
            self.pump.cancel()
            await asyncio.gather(self.pump, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """One message of the client."""
        if self.principal is None:
            return
        try:
            await self._answer(text_data, self.principal)
        except Gone:
            return
        except TimeoutError:
            await self._too_slow()

    async def _answer(self, text: str | None, principal: Principal) -> None:
        try:
            await self._apply(parse_request(text), principal)
        except BadMessage as error:
            self.bad_messages += 1
            await self._control(StreamType.ERROR, data={"code": "bad_message", "detail": str(error)})
            if self.bad_messages >= MAX_BAD_MESSAGES:
                await self.close(Close.POLICY)
        except DATABASE_ERRORS:
            detail = "the database does not answer; subscribe again in a few seconds"
            await self._control(StreamType.ERROR, data={"code": "unavailable", "detail": detail})

    async def close(self, code: int | bool | None = None, reason: str | None = None) -> None:
        """Close, unless it is closed."""
        if not self.closing:
            self.closing = True
            with contextlib.suppress(OSError):  # what a server raises when the client has left
                await super().close(code, reason)

    async def _apply(self, request: Request, principal: Principal) -> None:
        for topic in request.unsubscribe:
            self._drop(topic)
            await self._control(StreamType.UNSUBSCRIBED, topic=topic)
        for topic, last_seq in request.subscribe:
            if topic not in self.subscriptions and len(self.subscriptions) >= MAX_TOPICS:
                raise BadMessage(f"at most {MAX_TOPICS} topics a connection; unsubscribe from some")
            await self._subscribe(principal, topic, last_seq)

    async def _subscribe(self, principal: Principal, topic: str, last_seq: int | None) -> None:
        state = await _database(topic_read, principal, topic)
        if state is None:
            await self._refuse(topic)
            return
        start = state.seq if last_seq is None else last_seq
        if start > state.seq:
            await self._control(StreamType.RESET, topic=topic, seq=state.seq)
            start = state.seq
        await self._control(StreamType.SUBSCRIBED, topic=topic, seq=start)
        self.subscriptions[topic] = Subscription(topic, start)
        self.hub.join(topic, self.on_nudge)
        self._nudged(topic)

    async def _refuse(self, topic: str) -> None:
        self._drop(topic)
        detail = "there is no such topic, or you may not read it"
        await self._control(StreamType.ERROR, topic=topic, data={"code": "not_found", "detail": detail})

    def _drop(self, topic: str) -> None:
        if self.subscriptions.pop(topic, None) is not None:
            self.hub.leave(topic, self.on_nudge)

    def _nudged(self, topic: str) -> None:
        self.dirty.add(topic)
        self.wake.set()

    async def _pump(self) -> None:
        """Send what is new, for as long as the connection lives."""
        due = time.monotonic() + self.interval_s
        try:
            while True:
                try:
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self.wake.wait()
                except TimeoutError:
                    pass
                await asyncio.sleep(COALESCE_S)
                self.wake.clear()
                timed = time.monotonic() >= due
                if timed:
                    due = time.monotonic() + self.interval_s
                await self._round(timed)
        except Gone:
            return
        except TimeoutError:
            await self._too_slow()
        except Exception:
            log.exception("live_pump_failed")
            await self.close(Close.BUG)
            raise

    async def _round(self, timed: bool) -> None:
        """Read and send once: nudged topics, or on the timer all of them, after looking at the caller again."""
        nudged, self.dirty = self.dirty, set()
        try:
            if timed:
                self.principal = await _database(principal_read, self.credentials)
            if self.principal is None:
                await self.close(Close.UNAUTHENTICATED)
                return
            topics = list(self.subscriptions) if timed else [topic for topic in self.subscriptions if topic in nudged]
            missed = 0
            for topic in topics:
                sent = await self._catch_up(self.principal, topic)
                missed += 0 if topic in nudged else sent
            if timed and missed:
                self.hub.suspect()
        except DATABASE_ERRORS as error:
            self.dirty |= nudged
            log.warning("live_database_down", error=str(error))
            await asyncio.sleep(min(1.0, self.interval_s))

    async def _catch_up(self, principal: Principal, topic: str) -> int:
        """Send a topic's new events, page by page. Returns how many."""
        subscription = self.subscriptions.get(topic)
        sent = 0
        while subscription is not None and self.subscriptions.get(topic) is subscription:
            page = await _database(page_read, principal, topic, subscription.last_seq, PAGE)
            if page is None:
                await self._refuse(topic)
                break
            for envelope in page:
                if self.subscriptions.get(topic) is not subscription:
                    return sent
                await self._send(envelope)
                subscription.last_seq = envelope["seq"]
                sent += 1
            if len(page) < PAGE:
                break
        return sent

    async def _control(
        self, kind: StreamType, *, topic: str = "", seq: int = 0, data: dict[str, Any] | None = None
    ) -> None:
        ts = timezone.now().isoformat().replace("+00:00", "Z")
        await self._send(
            {"v": ENVELOPE_VERSION, "topic": topic, "seq": seq, "type": kind.value, "ts": ts, "data": data or {}}
        )

    async def _send(self, envelope: dict[str, Any]) -> None:
        """Raises: TimeoutError when the client does not read, Gone."""
        if self.closing:
            raise Gone
        async with asyncio.timeout(self.send_timeout_s):
            try:
                await self.send(text_data=json.dumps(envelope, separators=(",", ":")))
            except OSError as error:
                raise Gone from error

    async def _too_slow(self) -> None:
        log.warning("live_client_too_slow", caller=self.principal.identity if self.principal else "")
        await self.close(Close.TRY_LATER)


async def _database(function: Callable[..., T], *args: Any) -> T:
    """Run a read in the thread pool: connections do not queue behind one another's."""
    result: T = await database_sync_to_async(function, thread_sensitive=False)(*args)
    return result
