"""Brings one weight slot to the target that the control plane gave it, in a thread of its own. The newest target wins.

The shadow that deltas apply to is apart from the weights that serve: a target that fails leaves the slot serving what
it served, and says why.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final

from rl_core.delta import Reconciled, ShadowWeights, Target, reconcile, weights_root
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import SlotState, SlotStatus, TargetBody, UpdateStats
from rl_core.errors import EngineError, RlCoreError
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

log = logging.getLogger(__name__)

# Waits before a retryable failure is tried again, in seconds; then the control plane must ask again.
_RETRY_AFTER_S: Final = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a slot serves, as one value: who asks during a swap never sees one version with another's root."""

    version: str | None
    root: str
    update: UpdateStats | None


class SlotReconciler:
    """Owns the shadow of one slot."""

    def __init__(self, engine: Engine, slot: str, *, store: ObjectStore, root: str | None = None) -> None:
        """`root` is that of the slot's present weights, where it is known already."""
        self._engine = engine
        self._slot = slot
        self._store = store
        present = engine.version(slot)
        self._standing = _Standing(str(present) if present else None, root or weights_root(engine.tensors(slot)), None)
        self._shadow: ShadowWeights | None = None
        self._error: RlCoreError | None = None
        self._target: TargetBody | None = None
        self._pending: TargetBody | None = None
        self._working = False
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"reconcile-{slot}", daemon=True)
        self._thread.start()

    @property
    def root(self) -> str:
        """The root of the weights that serve."""
        return self._standing.root

    def set_target(self, target: TargetBody) -> None:
        """Take a target; a target that waits is replaced."""
        with self._wake:
            self._target = self._pending = target
            self._error = None
            self._wake.notify_all()

    def status(self) -> SlotStatus:
        """Where the slot stands."""
        with self._wake:
            busy = self._working or self._pending is not None
            poisoned = self._shadow is not None and self._shadow.poisoned and not busy
            standing, error = self._standing, self._error
            return SlotStatus(
                version=standing.version,
                root=standing.root,
                state=SlotState.RECONCILING if busy else SlotState.POISONED if poisoned else SlotState.READY,
                target=self._target.version if self._target else None,
                error=str(error) if error else None,
                error_code=error.code if error else None,
                update=standing.update,
            )

    def close(self) -> None:
        """End the thread, after what it is at."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._working = False
                self._wake.wait_for(lambda: self._closing or self._pending is not None)
                if self._closing or self._pending is None:
                    return
                target, self._pending, self._working = self._pending, None, True
            error = self._pursue(target)
            with self._wake:
                if self._pending is None:
                    self._error = error

    def _pursue(self, target: TargetBody) -> RlCoreError | None:
        """Apply a target, trying again what may succeed later; the error that stands in the end."""
        for wait_s in (*_RETRY_AFTER_S, None):
            try:
                self._apply(target)
            except RlCoreError as error:
                log.warning("target_failed slot=%s version=%s error=%s", self._slot, target.version, error)
                if wait_s is None or not error.retryable or self._interrupted(wait_s):
                    return error
            except Exception as error:
                log.exception("target_fault slot=%s version=%s", self._slot, target.version)
                return EngineError(f"the update failed: {type(error).__name__}: {error}")
            else:
                return None
        return None

    def _interrupted(self, wait_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: self._closing or self._pending is not None, timeout=wait_s)

    def _apply(self, target: TargetBody) -> None:
        version = VersionRef.parse(target.version)
        if target.root == self.root and self._shadow is None:
            self._engine.relabel(version, slot=self._slot)
            self._standing = _Standing(target.version, target.root, self._standing.update)
            return
        if self._shadow is None:
            present = self._engine.version(self._slot)
            self._shadow = ShadowWeights.from_tensors(
                self._engine.tensors(self._slot), version=str(present) if present else ""
            )
        wanted = Target(version=target.version, root=target.root, manifest=target.manifest, snapshot=target.snapshot)
        done = reconcile(self._store, self._shadow, wanted)
        update = self._standing.update
        if not done.changed:
            self._engine.relabel(version, slot=self._slot)
        else:
            update = self._swap(done, version, target)
        self._standing = _Standing(target.version, done.root, update)

    def _swap(self, done: Reconciled, version: VersionRef, target: TargetBody) -> UpdateStats:
        assert self._shadow is not None
        try:
            staged = self._engine.stage(done.changed, slot=self._slot)
            pause_s = self._engine.commit(staged, version=version, kv=target.kv)
        except RlCoreError:
            # The shadow has moved and the engine has not: the next update must carry these tensors too.
            self._shadow.unreported.update(done.changed)
            raise
        update = UpdateStats(
            bytes_fetched=done.bytes_fetched, hops=len(done.hops), fetch_s=done.fetch_s, decode_s=done.decode_s,
            verify_s=done.verify_s, stage_s=staged.stage_s, pause_s=pause_s, changed_tensors=staged.changed_tensors,
        )  # fmt: skip
        log.info(
            "swapped slot=%s version=%s hops=%d bytes=%d changed=%d stage_s=%.3f pause_s=%.4f",
            self._slot, version, len(done.hops), done.bytes_fetched, staged.changed_tensors, staged.stage_s, pause_s,
        )  # fmt: skip
        return update
