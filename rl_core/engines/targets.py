"""The newest target wins: a thread that brings a weight slot to the target it was given last. Imports no torch."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Final

from rl_core.engines.protocol import SlotStatus, TargetBody
from rl_core.errors import EngineError, Interrupted, RlCoreError, bare
from rl_core.types import VersionRef

log = logging.getLogger(__name__)

# Waits before a retryable failure is tried again, in seconds; then the control plane must ask again.
_RETRY_AFTER_S: Final = (0.5, 1.0, 2.0)


class TargetLoop(ABC):
    """Owns the targets of one slot. A subclass says how one is applied, and calls `start` when it is ready to."""

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._error: RlCoreError | None = None
        self._target: TargetBody | None = None
        self._pending: TargetBody | None = None
        self._working = False
        self._nudged = False
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"reconcile-{slot}", daemon=True)

    def start(self) -> None:
        """Begin to take targets."""
        self._thread.start()

    def set_target(self, target: TargetBody) -> None:
        """Take a target; a target that waits is replaced."""
        with self._wake:
            self._target = self._pending = target
            self._error = None
            self._wake.notify_all()

    @abstractmethod
    def status(self) -> SlotStatus:
        """Where the slot stands."""

    def close(self) -> None:
        """End the thread, after what it is at."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    @abstractmethod
    def _apply(self, target: TargetBody) -> None:
        """Bring the slot to a target. Raises: RlCoreError, of which a retryable one is tried again; Interrupted."""

    def _spare_work(self) -> bool:
        """Do a small piece of what there is to do while there is no target. Whether there was any."""
        return False

    def _nudge(self) -> None:
        """There may be spare work. From any thread."""
        with self._wake:
            self._nudged = True
            self._wake.notify_all()

    def _overtaken(self, target: TargetBody) -> bool:
        """Whether `target` is to be left for the one that waits.

        A later version of the same lineage does not overtake: it lies behind this one, and over a slow link a replica
        that always turned to the newest would never arrive.
        """
        with self._wake:
            if self._closing or self._pending is None:
                return self._closing
            waiting, wanted = VersionRef.parse(self._pending.version), VersionRef.parse(target.version)
            ahead = waiting.lineage == wanted.lineage and waiting > wanted
            return self._pending.repair or not ahead

    @property
    def _busy(self) -> bool:
        """Whether a target is worked on or waits. Asked under `_wake`."""
        return self._working or self._pending is not None

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._working = False
                self._wake.wait_for(lambda: self._closing or self._pending is not None or self._nudged)
                if self._closing:
                    return
                target, self._pending = self._pending, None
                self._working, self._nudged = target is not None, False
            if target is None:
                if self._did_spare_work():
                    self._nudge()
                continue
            error = self._pursue(target)
            with self._wake:
                self._nudged = True
                if self._pending is None:
                    self._error = error

    def _did_spare_work(self) -> bool:
        try:
            return self._spare_work()
        except Exception:  # targets are taken all the same
            log.exception("spare_work_fault slot=%s", self._slot)
            return False

    def _pursue(self, target: TargetBody) -> RlCoreError | None:
        """Apply a target, trying again what may succeed later; the error that stands in the end."""
        for wait_s in (*_RETRY_AFTER_S, None):
            try:
                self._apply(target)
            except Interrupted:
                log.info("target_overtaken slot=%s version=%s", self._slot, target.version)
                return None
            except RlCoreError as error:
                log.warning("target_failed slot=%s version=%s error=%s", self._slot, target.version, error)
                if wait_s is None or not error.retryable or self._interrupted(wait_s):
                    return bare(error)
            except Exception as error:
                log.exception("target_fault slot=%s version=%s", self._slot, target.version)
                return EngineError(f"the update failed: {type(error).__name__}: {error}")
            else:
                return None
        return None

    def _interrupted(self, wait_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: self._closing or self._pending is not None, timeout=wait_s)
