"""The requests of one slot that wait for a row: in the order in which they came, those of users before the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rl_core.engines.request import ActiveSequence, Request
from rl_core.errors import EngineBusy


class Waiting:
    """A queue in which the background takes no place from the foreground. Not thread-safe: the scheduler locks it."""

    def __init__(self, limit: int) -> None:
        """`limit` bounds the foreground by itself, and everything together for whom is in the background."""
        self._limit = limit
        self._queue: deque[ActiveSequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[ActiveSequence]:
        return iter(self._queue)

    @property
    def first(self) -> ActiveSequence:
        """Who is next."""
        return self._queue[0]

    def check_room(self, request: Request) -> None:
        """Raises: EngineBusy when too many wait already."""
        before = sum(request.background or not one.request.background for one in self._queue)
        if before >= self._limit:
            raise EngineBusy(f"{before} requests are waiting; try again in a moment")

    def add(self, sequence: ActiveSequence) -> None:
        """Queue a new request: in the foreground before all of the background that has not begun."""
        end = len(self._queue)
        if not sequence.request.background:
            later = (place for place, one in enumerate(self._queue) if one.request.background and not one.sampled)
            end = next(later, end)
        self._queue.insert(end, sequence)

    def put_back(self, begun: list[ActiveSequence]) -> None:
        """Sequences that lost their rows come first again, in their order."""
        self._queue.extendleft(reversed(begun))

    def take(self) -> ActiveSequence:
        """Take who is next."""
        return self._queue.popleft()

    def take_aborted(self) -> list[ActiveSequence]:
        """Take out what was aborted."""
        gone = [sequence for sequence in self._queue if sequence.aborted]
        self._queue = deque(sequence for sequence in self._queue if not sequence.aborted)
        return gone

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
