"""Single events that come at the same time are stored together: one transaction, one commit, for whoever waits.

Each caller waits for its turn; the one whose turn it is takes all that wait with it. Nobody waits for others to come,
so a caller alone is as fast as ever, and the busier it is the less each event costs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

from controlplane.services.entries import Outcome, Sender
from controlplane.services.feedback import feedback_receive_many
from controlplane.services.payloads import MAX_BATCH_ITEMS

Given = TypeVar("Given")
Got = TypeVar("Got")
MAX_SENDERS = 1024  # one that falls out of memory only gathers less


class _Call(Generic[Given, Got]):
    """One caller's item, and what came of it."""

    def __init__(self, item: Given) -> None:
        self.item = item
        self.got: list[Got] = []
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return bool(self.got) or self.error is not None


class Gathering(Generic[Given, Got]):
    """Does `work` for one caller at a time and for all that wait then."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._waiting: deque[_Call[Given, Got]] = deque()
        self._turn = threading.Lock()

    def do(self, item: Given, work: Callable[[Sequence[Given]], Sequence[Got]]) -> Got:
        """What `work` gives for the item. Raises: what it raises, to all for whom it was done."""
        call: _Call[Given, Got] = _Call(item)
        self._waiting.append(call)
        with self._turn:
            while not call.over:
                self._work(work)
        if call.error is not None:
            raise call.error
        return call.got[0]

    def _work(self, work: Callable[[Sequence[Given]], Sequence[Got]]) -> None:
        """Take those that wait, in the order of arrival."""
        calls: list[_Call[Given, Got]] = []
        while self._waiting and len(calls) < self._most:
            calls.append(self._waiting.popleft())
        try:
            for call, got in zip(calls, work([call.item for call in calls]), strict=True):
                call.got.append(got)
        except BaseException as error:  # noqa: BLE001  # raised again by each of the callers
            for call in calls:
                call.error = error


@lru_cache(maxsize=MAX_SENDERS)
def _gathering(project: object, name: str, actor: str) -> Gathering[bytes, Outcome]:
    return Gathering(most=MAX_BATCH_ITEMS)


def feedback_gathered(*, sender: Sender, body: bytes) -> Outcome:
    """`feedback_receive_many` of one event, together with those of the same sender that wait. Raises: as that."""

    def work(bodies: Sequence[bytes]) -> Sequence[Outcome]:
        return feedback_receive_many(sender=sender, items=bodies)

    return _gathering(sender.project.pk, sender.name, sender.actor.name).do(body, work)
