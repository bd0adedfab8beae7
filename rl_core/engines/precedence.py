"""Who goes first where one engine answers users from one slot and rollouts from another.

Slots decode in threads of their own and share the machine. A slot in which nothing but background requests run lets
the others go first: it takes no step while a foreground request is under way anywhere, but one every `GIVE_WAY_S`, so
that nothing in the background starves for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

GIVE_WAY_S: Final = 0.2
_LOOK_AGAIN_S: Final = 0.02


class Precedence:
    """Counts the foreground requests of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._foreground = 0

    def enter(self, ended: Future[Any]) -> None:
        """A foreground request is under way until `ended` is done."""
        with self._changed:
            self._foreground += 1
        ended.add_done_callback(self._leave)

    def give_way(self, interrupted: Callable[[], bool]) -> None:
        """Wait while a foreground request is under way: `GIVE_WAY_S` at most, or until the caller is interrupted."""
        deadline = time.monotonic() + GIVE_WAY_S
        with self._changed:
            while self._foreground and not interrupted() and time.monotonic() < deadline:
                self._changed.wait(_LOOK_AGAIN_S)

    def _leave(self, _: Future[Any]) -> None:
        with self._changed:
            self._foreground -= 1
            self._changed.notify_all()
