"""Brings one weight slot to the target that the control plane gave it, in a thread of its own. The newest target wins.

The shadow that deltas apply to is apart from the weights that serve: a target that fails leaves the slot serving what
it served, and says why.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from rl_core.delta import Reconciled, ShadowWeights, Target, reconcile, weights_root
from rl_core.delta.early import DecodeAhead, EarlyHop
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.priority import give_way
from rl_core.delta.shadow import forms_of, refuse_another_form
from rl_core.engines.engine import Engine
from rl_core.engines.progress import ProgressMeter
from rl_core.engines.protocol import SlotState, SlotStatus, TargetBody, UpdatePhase, UpdateStats
from rl_core.engines.sharing import SegmentSharing
from rl_core.engines.targets import TargetLoop
from rl_core.errors import Interrupted
from rl_core.store import ObjectStore
from rl_core.types import VersionRef

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a slot serves, as one value: who asks during a swap never sees one version with another's root."""

    version: str | None
    root: str
    update: UpdateStats | None


class SlotReconciler(TargetLoop):
    """Owns the shadow of one slot."""

    def __init__(
        self,
        engine: Engine,
        slot: str,
        *,
        store: ObjectStore,
        root: str | None = None,
        sharing: SegmentSharing | None = None,
        threads: int = 1,
    ) -> None:
        """`root` is that of the slot's present weights, where it is known; `sharing` is where segments are kept.

        `threads` decode, and as many hash.
        """
        super().__init__(slot)
        self._engine = engine
        self._store = store
        self._sharing = sharing
        self._threads = threads
        self._progress: ProgressMeter | None = None
        present = engine.version(slot)
        self._standing = _Standing(
            str(present) if present else None, root or weights_root(engine.tensors(slot), threads=threads), None
        )
        self._shadow: ShadowWeights | None = None
        self._stale: set[str] = set()  # what the shadow has and the engine has not: what fails leaves it to the next
        self._ahead = None if sharing is None else DecodeAhead(sharing.ahead, sharing.spool, slot, threads=threads)
        if sharing is not None:
            sharing.ahead.listen(self._nudge)
        self.start()

    @property
    def root(self) -> str:
        """The root of the weights that serve."""
        return self._standing.root

    def status(self) -> SlotStatus:
        """Where the slot stands."""
        with self._wake:
            busy = self._busy
            damaged = self._shadow is not None and self._shadow.damaged
            standing, error = self._standing, self._error
            return SlotStatus(
                version=standing.version,
                root=standing.root,
                state=SlotState.RECONCILING if busy else SlotState.POISONED if damaged else SlotState.READY,
                target=self._target.version if self._target else None,
                error=str(error) if error else None,
                error_code=error.code if error else None,
                update=standing.update,
                progress=self._progress.now if self._progress is not None and busy else None,
            )

    def close(self) -> None:
        """End the thread, after what it is at."""
        super().close()
        if self._ahead is not None:
            self._ahead.abandon()

    def _spare_work(self) -> bool:
        if self._ahead is None or not self._ahead.due(self._shadow_root):
            return False
        self._ahead.work(self._shadow_root, self._take_shadow)
        return True

    @property
    def _shadow_root(self) -> str:
        """What can be decoded onto; empty while that is nothing."""
        if self._shadow is None:
            return self.root
        return "" if self._shadow.poisoned else self._shadow.root

    def _take_shadow(self) -> ShadowWeights:
        if self._shadow is None:
            present = self._engine.version(self._slot)
            self._shadow = ShadowWeights.from_tensors(
                self._engine.tensors(self._slot), version=str(present) if present else "", threads=self._threads
            )
        return self._shadow

    def _hand_over(self) -> EarlyHop | None:
        return self._ahead.hand_over() if self._ahead is not None else None

    def _apply(self, target: TargetBody) -> None:
        give_way()
        version = VersionRef.parse(target.version)
        if target.root == self.root and self._shadow is None and not target.repair:
            self._engine.relabel(version, slot=self._slot)
            self._standing = _Standing(target.version, target.root, self._standing.update)
            return
        shadow = self._take_shadow()
        if target.repair:
            if (early := self._hand_over()) is not None:
                early.close()
            shadow.doubt()
        wanted = Target(
            version=target.version, root=target.root, manifest=target.manifest, snapshot=target.snapshot,
            deltas=tuple(target.deltas),
        )  # fmt: skip
        self._progress = ProgressMeter()
        self._engine.update_begins(slot=self._slot)
        with self._source(target) as source:
            done = reconcile(
                self._store, shadow, wanted, source=source, on_progress=self._progress.tell,
                threads=self._threads, early=self._hand_over(),
            )  # fmt: skip
        self._stale.update(done.changed)
        serving = forms_of(self._engine.tensors(self._slot))
        refuse_another_form(target.version, shadow.tensors, serving=serving)
        self._stale &= shadow.tensors.keys()  # a version that was refused may have had others
        self._progress.at(UpdatePhase.STAGE)
        update = self._standing.update
        if not self._stale:
            self._engine.relabel(version, slot=self._slot)
        else:
            update = self._swap(done, shadow, version, target)
        self._standing = _Standing(target.version, done.root, update)

    def _source(self, target: TargetBody) -> AbstractContextManager[SegmentSource]:
        overtaken = partial(self._overtaken, target)
        if self._sharing is not None:
            return self._sharing.source(self._store, target, interrupted=overtaken)
        return nullcontext(SegmentSource(self._store, limit_bytes_s=target.limit_bytes_s, interrupted=overtaken))

    def _swap(self, done: Reconciled, shadow: ShadowWeights, version: VersionRef, target: TargetBody) -> UpdateStats:
        staged = self._engine.stage({name: shadow.tensors[name] for name in self._stale}, slot=self._slot)
        if self._overtaken(target):
            raise Interrupted
        pause_s = self._engine.commit(staged, version=version, kv=target.kv)
        self._stale.clear()
        update = UpdateStats(
            bytes_fetched=done.bytes_fetched, bytes_from_peers=done.bytes_from_peers, hops=len(done.hops),
            fetch_s=done.fetch_s, store_s=done.store_s, decode_s=done.decode_s,
            verify_s=done.verify_s, stage_s=staged.stage_s, pause_s=pause_s, changed_tensors=staged.changed_tensors,
        )  # fmt: skip
        log.info(
            "swapped slot=%s version=%s hops=%d bytes=%d changed=%d stage_s=%.3f pause_s=%.4f",
            self._slot, version, len(done.hops), done.bytes_fetched, staged.changed_tensors, staged.stage_s, pause_s,
        )  # fmt: skip
        return update
