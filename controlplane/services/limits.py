"""Rate limits: token buckets in Valkey, shared by all web processes; in this process alone while Valkey is away.

A bucket holds a minute's worth of tokens and is kept as one number, the time at which it will be full again (GCRA).
Losing it, as when Valkey is started anew, fills it: it is no truth, only a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import redis
import structlog
from django.conf import settings
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

log = structlog.get_logger(__name__)

WINDOW_S = 60.0
TIMEOUT_S = 0.25
AWAY_S = 5.0  # how long Valkey is not asked again after it did not answer
MAX_LOCAL = 100_000

# For each key: how many of the wanted events fit, and seconds until the next one does. Times are microseconds.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local answers = {}
for index, key in ipairs(KEYS) do
  local wanted, interval, window = tonumber(ARGV[index * 2 - 1]), tonumber(ARGV[index * 2]), tonumber(ARGV[#ARGV])
  local full_at = math.max(tonumber(redis.call('GET', key) or '0'), now)
  local taken = math.min(wanted, math.max(0, math.floor((window - (full_at - now)) / interval)))
  if taken > 0 then
    full_at = full_at + taken * interval
    redis.call('SET', key, string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000) + 1)
  end
  answers[#answers + 1] = taken
  answers[#answers + 1] = math.max(0, math.ceil(full_at - now + interval - window))
end
return answers
"""


class Take(NamedTuple):
    """What is wanted of one bucket."""

    bucket: str
    events: int
    per_minute: int


class Grant(NamedTuple):
    """How many events the bucket lets through, and how long until it lets through another."""

    events: int
    wait_s: float


def limits_take(takes: Sequence[Take]) -> list[Grant]:
    """Take what there is of each bucket; the buckets are apart from one another."""
    if not takes:
        return []
    return _valkey.take(takes) or _local.take(takes)


@dataclass(slots=True)
class _Valkey:
    """Asks Valkey, and leaves it alone for a while after it did not answer."""

    away_until: float = 0.0

    def take(self, takes: Sequence[Take]) -> list[Grant] | None:
        """None while Valkey is away."""
        if time.monotonic() < self.away_until:
            return None
        numbers: list[Any] = []
        for take in takes:
            numbers += [take.events, interval_us(take.per_minute)]
        keys = [f"slipway:limit:{take.bucket}" for take in takes]
        try:
            answer: Any = _script(settings.REDIS_URL)(keys=keys, args=[*numbers, WINDOW_S * 1e6])
        except (RedisError, OSError) as error:
            self.away_until = time.monotonic() + AWAY_S
            log.warning("limits_local", error=str(error)[:200])
            return None
        return [Grant(int(answer[n]), int(answer[n + 1]) / 1e6) for n in range(0, len(answer), 2)]


@cache
def _script(url: str) -> Any:
    once = Retry(NoBackoff(), 0)  # by default the client tries for seconds
    client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=once)
    return client.register_script(_TAKE)


class LocalBuckets:
    """The same buckets in this process."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, takes: Sequence[Take], *, now_us: float | None = None) -> list[Grant]:
        """Take what there is of each bucket."""
        now = time.monotonic() * 1e6 if now_us is None else now_us
        with self._lock:
            if len(self._full_at) > MAX_LOCAL:
                self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
            return [self._take(take, now) for take in takes]

    def _take(self, take: Take, now: float) -> Grant:
        interval, window = interval_us(take.per_minute), WINDOW_S * 1e6
        full_at = max(self._full_at.get(take.bucket, 0.0), now)
        taken = min(take.events, max(0, int((window - (full_at - now)) // interval)))
        if taken:
            full_at += taken * interval
            self._full_at[take.bucket] = full_at
        return Grant(taken, max(0.0, full_at - now + interval - window) / 1e6)


def interval_us(per_minute: int) -> float:
    """Microseconds in which the bucket gains one token."""
    return WINDOW_S * 1e6 / max(1, per_minute)


_valkey, _local = _Valkey(), LocalBuckets()
