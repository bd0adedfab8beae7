"""One vLLM as an engine: attached, steered, swapped. It may end and come back at any time, and so may the sidecar.

What a worker says of itself is the truth, and is asked for after every swap, failed ones too, and at every attach:
vLLM goes on only when all workers hold one whole version, under the name of that, and without what caches hold of
another. So a sidecar that was killed in the middle of a swap finds vLLM paused, with the old weights or the new ones,
and lets it go on under the right name. A vLLM that was started again has the weights of its folder and no version;
nothing is answered by it before it has been attached, and the control plane targets it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Final

import msgspec

from rl_core.engines.protocol import SlotState, TargetBody, UpdateStats
from rl_core.engines.vllm.messages import TransferSource, WorkerState, WorkerStatus
from rl_core.engines.vllm.numbers import Counters, shadow_bytes, slot_numbers
from rl_core.engines.vllm.standing import given_up, holds, sound
from rl_core.engines.vllm.tickets import Tickets
from rl_core.engines.vllm.upstream import VllmControl
from rl_core.errors import EngineError, EngineUnreachable, Interrupted, RlCoreError
from rl_core.types import KvMode, PauseMode, VersionRef

log = logging.getLogger(__name__)

_WATCH_S: Final = 1.0
_PREPARED_AGAIN_S: Final = 0.05


class VllmReplica:
    """Thread-safe. `slot` is the name of its one weight slot."""

    def __init__(
        self, control: VllmControl, *, slot: str, source: TransferSource | None, twin: bool, max_seqs: int,
        max_waiting: int, drain_s: float,
    ) -> None:  # fmt: skip
        self.tickets = Tickets(capacity=max_seqs + max_waiting)
        self.counters = Counters()
        self.workers: list[WorkerStatus] = []
        self.update: UpdateStats | None = None
        self._control = control
        self._slot, self._source, self._twin = slot, source, twin and source is not None
        self._max_seqs, self._drain_s = max_seqs, drain_s
        self._born = time.monotonic()
        self._paused: PauseMode | None = None
        self._attached = False
        self._damaged = False
        # The root of the weights that what vLLM caches was computed with; None where nobody knows.
        self._cached_root: str | None = None
        # Held by whoever pauses, swaps, resumes or attaches: one of them at a time.
        self._steering = threading.RLock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch-vllm", daemon=True)

    @property
    def slots(self) -> tuple[str, ...]:
        """The name of the one weight slot."""
        return (self._slot,)

    @property
    def uptime_s(self) -> float:
        """Seconds since the sidecar was started."""
        return time.monotonic() - self._born

    @property
    def attached(self) -> bool:
        """Whether vLLM is there and known."""
        return self._attached

    @property
    def damaged(self) -> bool:
        """Whether the workers do not all hold one whole version: nothing may be generated."""
        return self._damaged

    def start(self) -> None:
        """Begin to look for vLLM."""
        self._watcher.start()

    def close(self) -> None:
        """Stop looking for vLLM, and fail what is in flight."""
        self._closing.set()
        self.tickets.closed = EngineError("the engine is stopping")
        self.tickets.evict_all(self.tickets.closed)
        self._watcher.join()
        self._control.close()

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. WAIT returns when what was running has finished. Raises: EngineError."""
        with self._steering:
            before, self._paused = self._paused, mode
            try:
                self._control.pause(mode)
            except EngineError as error:
                self._paused = before
                self.lost(error)  # it may be paused all the same
                raise

    def resume(self) -> None:
        """Go on; a vLLM that is not attached does so when it is. Raises: EngineError; a damaged model stays paused."""
        with self._steering:
            if self._damaged:
                raise EngineError("the model holds a part of an update and must not generate; give it a target")
            self._paused = None
            if not self._attached:
                return
            try:
                self._control.resume()
            except EngineError as error:
                self.lost(error)
                raise

    def prepare(self, target: TargetBody, *, interrupted: Callable[[], bool]) -> None:
        """Have every worker fetch and verify a target, and wait for it. Raises: RlCoreError, Interrupted."""
        self._require_attached()
        self._await_workers(interrupted)
        if target.limit_bytes_s is not None:  # each worker reads the store by itself
            share = target.limit_bytes_s / len(self.workers)
            target = msgspec.structs.replace(target, limit_bytes_s=share)
        self.workers = self._control.prepare(target)
        self._await_workers(interrupted)
        for worker in self.workers:
            if worker.state is not WorkerState.STAGED:
                raise given_up(worker)

    def swap(self, target: TargetBody) -> None:
        """Swap to what is staged, under a pause.

        Raises: EngineError; what the workers hold then serves under its own name, or nothing does.
        """
        version = VersionRef.parse(target.version)
        drain_s = self._drain_s if self._paused is None else 0.0
        with self.tickets.succession(version, drain_s=drain_s), self._steering:
            self._require_attached()
            changed = target.root != self._cached_root
            started = time.perf_counter()
            try:
                self._control.begin_update()
                self._control.pause(PauseMode.KEEP)
                self._go_on(self._load(target), kv=target.kv)
            except Exception as error:
                log.warning("swap_failed version=%s", version, exc_info=True)
                self._settle(error)
                if not self._serves(target):
                    raise
            pause_s = time.perf_counter() - started
        if changed:
            self.counters.swaps_total += 1
            self.counters.last_pause_s = pause_s
            update = self.workers[0].update
            self.update = msgspec.structs.replace(update, pause_s=pause_s) if update else None
        log.info("swapped version=%s pause_s=%.4f shadow_bytes=%d", version, pause_s, shadow_bytes(self.workers))

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Numbers of the slot; those of workers as of the last look, or asked for now where that is possible."""
        workers = self.workers
        if self._attached:
            with suppress(EngineError):
                workers = self._control.workers()
        numbers = slot_numbers(workers, in_flight=len(self.tickets), max_seqs=self._max_seqs)
        numbers |= {"paused": int(self._paused is not None or self._damaged), "attached": int(self._attached)}
        return {self._slot: numbers | asdict(self.counters)}

    def state(self, *, busy: bool) -> SlotState:
        """Where the slot stands."""
        if busy:
            return SlotState.RECONCILING
        poisoned = self._damaged or any(worker.poisoned for worker in self.workers)
        return SlotState.POISONED if poisoned else SlotState.READY

    def lost(self, error: Exception) -> None:
        """VLLM did not answer, or not as it should: no request is sent to it before it has been attached again."""
        if self._attached:
            log.warning("vllm_lost error=%s", error)
        self.tickets.closed = EngineUnreachable(f"vLLM is not attached: {error}")
        self._attached = False

    def _load(self, target: TargetBody) -> list[WorkerStatus]:
        """The workers, after they have loaded what is staged. Raises: EngineError unless all have."""
        self._control.load(target.version)
        workers = self._control.workers()
        if not sound(workers):
            log.warning("swap_broken version=%s; loading everything again", target.version)
            self._control.load(target.version)  # a damaged model takes the whole of the shadow
            workers = self._control.workers()
        for worker in workers:
            if not holds(worker, target):
                raise given_up(worker)
        return workers

    def _go_on(self, workers: list[WorkerStatus], *, kv: KvMode = KvMode.RECOMPUTE) -> None:
        """Let vLLM, which is paused, generate what its workers hold, under its name; a model that is damaged does not.

        Raises: EngineError; it is still paused then, unless only the answer to the last call was lost.
        """
        first = workers[0]
        self.workers, self._damaged = workers, not sound(workers)
        name = None if self._damaged else first.version or ""
        if any(worker.updating for worker in workers):
            self._control.finish_update(name)
        elif name is not None:
            self._control.label(name)
        if self._damaged:
            self._refuse_damaged()
            self._control.abort_all()
            self._attached = True
            return
        version = VersionRef.parse(first.version) if first.version else None
        if version != self.tickets.version:
            labelled = self.tickets.labelled()
            self.tickets.swapped(version, self._control.counts(labelled) if labelled else {})
        if first.root != self._cached_root:
            # vLLM drops cached blocks only together with the requests that hold them. Without prefix caching no
            # request finds the blocks of another, and KEEP lets those in flight keep theirs.
            if kv is KvMode.RECOMPUTE or first.prefix_caching:
                self._control.drop_caches()
            self._cached_root = first.root
        if self._paused is None:
            self._control.resume()
        self._attached = True  # before it opens: who loses vLLM in between closes it again
        self.tickets.closed = None

    def _settle(self, error: Exception) -> None:
        """After a swap that failed, at whatever step: what the workers say they hold goes on, or nothing does."""
        self.lost(error)
        try:
            self._attach()
        except EngineError as again:
            self.lost(again)

    def _serves(self, target: TargetBody) -> bool:
        return self._attached and not self._damaged and all(holds(worker, target) for worker in self.workers)

    def _refuse_damaged(self) -> None:
        self.counters.faults_total += 1
        self.tickets.closed = EngineError(
            "the model holds a part of an update; a target repairs it, or start vLLM again"
        )

    def _await_workers(self, interrupted: Callable[[], bool]) -> None:
        while True:
            self.workers = self._control.workers()
            if all(worker.state is not WorkerState.PREPARING for worker in self.workers):
                return
            if interrupted():
                raise Interrupted
            time.sleep(_PREPARED_AGAIN_S)

    def _require_attached(self) -> None:
        if not self._attached:
            raise EngineUnreachable(f"{self.tickets.closed}; the target is tried again")

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                if not self._control.healthy():
                    self.lost(EngineUnreachable("vLLM does not answer"))
                elif not self._attached:
                    self._attach_again()
                else:
                    self._forget_ended()
            except RlCoreError as error:
                self.lost(error)
            except Exception as error:
                log.exception("watch_fault")
                self.lost(error)
            self._closing.wait(_WATCH_S)

    def _forget_ended(self) -> None:
        """Let the workers forget how many tokens the requests had that left; later, when somebody steers.

        Idle workers are left alone: after each call they spin for a while.
        """
        if self.tickets.left and self._steering.acquire(blocking=False):
            try:
                self._control.counts(self.tickets.labelled())
            finally:
                self._steering.release()

    def _attach_again(self) -> None:
        with self._steering:
            if not self._attached:  # a swap that failed may have done so meanwhile
                self._attach()

    def _attach(self) -> None:
        """Learn what vLLM has, finish what was left of a swap, and begin to answer."""
        with self._steering:
            for worker in self._control.attach(self._source, twin=self._twin):
                if not worker.attached:
                    raise given_up(worker)
            self._control.pause(PauseMode.KEEP)
            self._go_on(self._control.workers())
            first = self.workers[0]
            log.info(
                "vllm_attached version=%s root=%s workers=%d shadow_bytes=%d prefix_caching=%s routes=%s damaged=%s",
                first.version or "", first.root[:16], len(self.workers), shadow_bytes(self.workers),
                first.prefix_caching, first.routes, self._damaged,
            )  # fmt: skip
