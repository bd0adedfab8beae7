"""Collecting dead grandchildren. A sandbox whose launcher was killed leaves its init to the nearest subreaper: us."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36


class Reaper:
    """Reaps adopted orphans, and leaves this process's own children to those who wait for them."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._starting = 0

    @staticmethod
    def adopt_orphans() -> None:
        """Become the parent of every descendant whose own parent dies."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While a child is being made its id is unknown: nothing is reaped meanwhile."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def own(self, pid: int) -> None:
        """A child that somebody waits for."""
        self._own.add(pid)

    def disown(self, pid: int) -> None:
        """That child has been waited for."""
        self._own.discard(pid)

    def reap(self) -> None:
        """Collect the dead that nobody waits for."""
        while not self._starting:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None or dead.si_pid in self._own:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(dead.si_pid, os.WNOHANG)
