"""The parts that the fleet's simulation is made of: a clock, servers with queues, and links that flows share.

Units: seconds and bytes throughout.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

Then = Callable[[], None]


class Clock:
    """Events in the order of their time; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._asked = 0

    def after(self, seconds: float, then: Then) -> None:
        """Call `then` so many seconds from now."""
        heapq.heappush(self._events, (self.now_s + seconds, self._asked, then))
        self._asked += 1

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._events:
            self.now_s, _, then = heapq.heappop(self._events)
            then()


class Server:
    """Does one job at a time, in the order of asking. `busy_s` is how long it has worked."""

    def __init__(self, clock: Clock) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._jobs: deque[tuple[float, Then]] = deque()
        self._idle = True

    def ask(self, seconds: float, then: Then) -> None:
        """Queue a job of so many seconds; `then` is called when it is done."""
        self._jobs.append((seconds, then))
        if self._idle:
            self._next()

    def _next(self) -> None:
        self._idle = not self._jobs
        if self._jobs:
            seconds, then = self._jobs.popleft()
            self.busy_s += seconds
            self._clock.after(seconds, lambda: self._done(then))

    def _done(self, then: Then) -> None:
        self._next()
        then()


class _Flow:
    def __init__(self, size: float, cap_bytes_s: float, then: Then) -> None:
        self.left = size
        self.cap_bytes_s = cap_bytes_s
        self.then = then
        self.bytes_s = 0.0


class SharedLink:
    """A link that flows share fairly; each flow also has a narrower link of its own. `sent` counts whole flows."""

    def __init__(self, clock: Clock, bytes_s: float) -> None:
        self.sent = 0.0
        self._clock = clock
        self._bytes_s = bytes_s
        self._flows: list[_Flow] = []
        self._since_s = 0.0
        self._plan = 0

    def send(self, size: float, *, cap_bytes_s: float, then: Then) -> None:
        """Begin a flow of `size` bytes; `then` is called when its last byte left."""
        self._advance()
        self._flows.append(_Flow(size, cap_bytes_s, then))
        self.sent += size
        self._share()

    def _advance(self) -> None:
        for flow in self._flows:
            flow.left -= flow.bytes_s * (self._clock.now_s - self._since_s)
        self._since_s = self._clock.now_s

    def _share(self) -> None:
        """Give every flow its rate, and plan the next end. A plan made before is void."""
        rates = max_min(self._bytes_s, [flow.cap_bytes_s for flow in self._flows])
        for flow, rate in zip(self._flows, rates, strict=True):
            flow.bytes_s = rate
        self._plan += 1
        if self._flows:
            plan, first = self._plan, min(self._flows, key=lambda flow: flow.left / flow.bytes_s)
            self._clock.after(max(0.0, first.left / first.bytes_s), lambda: self._end(first, plan))

    def _end(self, flow: _Flow, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        self._flows.remove(flow)
        self._share()
        flow.then()


def max_min(capacity: float, caps: Sequence[float]) -> list[float]:
    """Max-min fair shares of a capacity: nobody gets more than their cap, and what they leave goes to the others."""
    rates = [0.0] * len(caps)
    left = capacity
    for taken, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        rates[index] = min(caps[index], left / (len(caps) - taken))
        left -= rates[index]
    return rates
