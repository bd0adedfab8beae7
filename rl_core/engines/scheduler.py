"""The decode loop of one weight slot: continuous batching in a thread of its own.

Each turn of the loop prefills a bounded number of tokens and then decodes one for every running sequence, so that a
long prompt does not stop the others. Tokens are sampled in decode steps alone: prefill computes all but a sequence's
last token. Swaps, pauses and aborts are commands that run between two steps: no decode step sees two versions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

from rl_core.engines.batch import Batch
from rl_core.engines.gauges import Gauges
from rl_core.engines.precedence import Precedence
from rl_core.engines.request import ActiveSequence, OnToken, Request, TextCodec
from rl_core.engines.sampling import Sampled
from rl_core.engines.stops import StopMatcher
from rl_core.engines.waiting import Waiting
from rl_core.engines.weights import WeightSet
from rl_core.errors import EngineError, RequestRefused, VersionUnavailable
from rl_core.types import FinishReason, KvMode, PauseMode, VersionRef

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_UNDERFULL_CHUNKS: Final = 4
_DRAINED_AGAIN_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of a scheduler.

    `prefill_chunk` tokens are prefilled between decode steps; four times as many while more sequences wait than run.
    A swap waits `drain_s` seconds at most for requests that the next version may not answer; those that are left fail.
    """

    max_seqs: int = 32
    max_len: int = 1024
    retained: int = 32
    max_waiting: int = 256
    prefill_chunk: int = 64
    drain_s: float = 10.0


class Scheduler:
    """Generates with one set of weights at a time. All public methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        weights: WeightSet,
        *,
        codec: TextCodec,
        limits: SchedulerLimits,
        precedence: Precedence | None = None,
    ) -> None:
        """`precedence` is what the slots of one engine share, so that users go before rollouts."""
        self.name = name
        self._precedence = precedence or Precedence()
        self.limits = limits
        self.gauges = Gauges()
        self.version: VersionRef | None = None
        self._codec = codec
        self._batch = Batch(weights, max_seqs=limits.max_seqs, max_len=limits.max_len, retained=limits.retained)
        self._wake = threading.Condition()
        self._waiting = Waiting(limits.max_waiting)
        self._commands: list[Callable[[], None]] = []
        self._paused: PauseMode | None = None
        self._closing = False
        self._successors: list[VersionRef | None] = []
        self._serial = 0
        self._thread = threading.Thread(target=self._loop, name=f"decode-{name}", daemon=True)
        self._thread.start()

    @property
    def max_len(self) -> int:
        """The longest sequence, prompt and completion together."""
        return self._batch.max_len

    @property
    def weights(self) -> WeightSet:
        """The weights that serve now."""
        return self._batch.weights

    def submit(self, request: Request, on_token: OnToken | None = None) -> ActiveSequence:
        """Queue a request; its `future` gets the result. `on_token` is called on the decode thread.

        Raises: RequestRefused, VersionUnavailable, EngineBusy.
        """
        self._check(request)
        matcher = StopMatcher(request.sampling.stop, token_strings=self._codec.token_strings, decode=self._codec.decode)
        limit = min(request.sampling.max_tokens, self.max_len - len(request.prompt))
        with self._wake:
            if self._closing:
                raise EngineError("the engine is stopping")
            if not all(request.accepts(version) for version in (self.version, *self._successors)):
                raise VersionUnavailable(self._unavailable(request))
            self._waiting.check_room(request)
            self._serial += 1
            sequence = ActiveSequence(request, self._serial, limit, matcher, on_token)
            self._waiting.add(sequence)
            if not request.background:
                self._precedence.enter(sequence.future)
            self.gauges.requests_total += 1
            self._wake.notify()
        return sequence

    def abort(self, sequence: ActiveSequence) -> None:
        """End a request with what it has; a request that has ended is left alone."""
        with self._wake:
            sequence.aborted = True
            self._wake.notify()

    def commit(self, weights: WeightSet | None, *, version: VersionRef | None, kv: KvMode) -> float:
        """Flip to `weights` (None: the same ones under another name) between two steps; seconds the flip took.

        What `version` may not answer is taken no more, and what is in flight of it may finish first (see `drain_s`).
        """
        with self._wake:
            self._successors.append(version)
        try:
            self._drain(version)
            return self._call(lambda: self._commit(weights, version, kv))
        finally:
            with self._wake:
                self._successors.remove(version)

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. WAIT returns when what was running has finished, the other modes at once."""
        self._call(lambda: self._pause(mode))
        if mode is PauseMode.WAIT:
            with self._wake:
                self._wake.wait_for(lambda: self._drained() or self._paused is not mode)

    def resume(self) -> None:
        """Go on after a pause."""
        with self._wake:
            self._paused = None
            self._wake.notify_all()

    def snapshot(self) -> dict[str, float]:
        """Numbers for metrics."""
        return {
            "running": len(self._batch.members),
            "waiting": len(self._waiting),
            "kv_rows_used": self._batch.rows_used,
            "kv_rows": self.limits.max_seqs + self.limits.retained,
            "paused": int(self._paused is not None),
            **self.gauges.snapshot(),
        }

    def close(self) -> None:
        """Abort what is in flight and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    def _check(self, request: Request) -> None:
        vocab = self._batch.weights.config.vocab_size
        if not request.prompt:
            raise RequestRefused("the prompt is empty; send at least one token")
        if len(request.prompt) >= self.max_len:
            raise RequestRefused(
                f"the prompt has {len(request.prompt)} tokens; this engine holds {self.max_len} with the completion"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise RequestRefused(f"prompt token ids must be in [0, {vocab})")

    def _drain(self, version: VersionRef | None) -> None:
        deadline = time.monotonic() + self.limits.drain_s
        while time.monotonic() < deadline and self._call(lambda: self._stepping() and bool(self._outdated(version))):
            time.sleep(_DRAINED_AGAIN_S)

    def _outdated(self, version: VersionRef | None) -> list[ActiveSequence]:
        """What is in flight that `version` may not answer."""
        return [sequence for sequence in self._in_flight() if not sequence.request.accepts(version)]

    def _unavailable(self, request: Request) -> str:
        wanted = request.exact_version or request.min_version
        serves = " and then ".join(str(version or "no version yet") for version in (self.version, *self._successors))
        return f"version {wanted} is wanted; slot {self.name} serves {serves}"

    def _call(self, command: Callable[[], _T]) -> _T:
        """Run a command on the decode thread between two steps."""
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(command())
            except Exception as error:
                log.exception("command_fault slot=%s", self.name)
                outcome.set_exception(EngineError(f"the engine failed: {type(error).__name__}: {error}"))

        with self._wake:
            if self._closing:
                raise EngineError("the engine is stopping")
            self._commands.append(run)
            self._wake.notify_all()
        return outcome.result()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._commands) or self._runnable())
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            if self._closing:
                break
            started = time.perf_counter()
            try:
                self._sweep()
                if self._stepping():
                    if all(sequence.request.background for sequence in self._in_flight()):
                        self._precedence.give_way(lambda: self._closing or bool(self._commands))
                    self._step()
            except Exception as error:
                log.exception("decode_fault slot=%s", self.name)
                self._fault(EngineError(f"generation failed: {type(error).__name__}: {error}"))
            self.gauges.busy_s_total += time.perf_counter() - started
        self._end_all()

    def _stepping(self) -> bool:
        return self._paused is None or self._paused is PauseMode.WAIT

    def _runnable(self) -> bool:
        if any(s.aborted for s in self._in_flight()):
            return True
        return self._stepping() and bool(self._batch.members or self._admissible())

    def _admissible(self) -> bool:
        if not self._waiting:
            return False
        # A pause that waits lets go on what had begun: sequences that a swap sent back have begun.
        return self._paused is None or self._waiting.first.sampled > 0

    def _in_flight(self) -> list[ActiveSequence]:
        with self._wake:  # a request may come just now
            return [*self._batch.members, *self._waiting]

    def _drained(self) -> bool:
        return self._closing or not (self._batch.members or self._admissible())

    def _step(self) -> None:
        self._admit()
        self._prefill()
        if self._batch.running:
            self._decode()
        if self._paused is not None:
            with self._wake:
                self._wake.notify_all()

    def _admit(self) -> None:
        while self._batch.has_room:
            with self._wake:
                if not self._admissible():
                    return
                sequence = self._waiting.take()
            cached = self._batch.admit(sequence)
            if sequence.cached < 0:
                sequence.cached = cached
                self.gauges.prompt_tokens_total += len(sequence.tokens)
                self.gauges.cached_tokens_total += cached

    def _prefill(self) -> None:
        """Prefill a chunk; several, and of several sequences, while more sequences wait than run.

        A decode step costs little less for few sequences than for many: a batch is filled before it is decoded.
        """
        underfull = len(self._waiting) + 1 > len(self._batch.running)
        left = self.limits.prefill_chunk * (_UNDERFULL_CHUNKS if underfull else 1)
        while left > 0 and self._batch.prefilling is not None:
            left -= self._batch.prefill(left)
            self._admit()

    def _decode(self) -> None:
        results, seconds = self._batch.decode()
        self.gauges.generated_tokens_total += len(results)
        version = str(self.version) if self.version else ""
        ended: list[tuple[int, FinishReason]] = []
        for row, (sequence, result) in enumerate(zip(self._batch.running, results, strict=True)):
            reason = sequence.push(result, version, self._codec.eos_ids)
            if reason is not None:
                ended.append((row, reason))
            if sequence.on_token is not None:
                _notify(sequence, sequence.on_token, result)
        for row, reason in reversed(ended):
            self._finish(self._batch.release(row), reason)
        self.gauges.stepped(seconds, more=bool(self._batch.members))

    def _finish(self, sequence: ActiveSequence, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            self.gauges.aborted_total += 1
        if not sequence.future.done():
            sequence.future.set_result(sequence.result(reason, self._codec))

    def _sweep(self) -> None:
        """End what was aborted."""
        for row in reversed(range(len(self._batch.running))):
            if self._batch.running[row].aborted:
                self._finish(self._batch.release(row), FinishReason.ABORT)
        sequence = self._batch.prefilling
        if sequence is not None and sequence.aborted:
            self._batch.prefilling = None
            self._finish(sequence, FinishReason.ABORT)
        with self._wake:
            gone = self._waiting.take_aborted()
        for sequence in gone:
            self._finish(sequence, FinishReason.ABORT)

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode is PauseMode.ABORT:
            self._abort_all()

    def _abort_all(self) -> None:
        with self._wake:
            for sequence in self._in_flight():
                sequence.aborted = True
        self._sweep()

    def _commit(self, weights: WeightSet | None, version: VersionRef | None, kv: KvMode) -> float:
        started = time.perf_counter()
        self.version = version
        if weights is not None:
            back = self._batch.swap(weights, recompute=kv is KvMode.RECOMPUTE)
            with self._wake:
                self._waiting.put_back(back)
            self.gauges.swapped(time.perf_counter() - started)
        self._refuse_outdated()
        return time.perf_counter() - started

    def _refuse_outdated(self) -> None:
        """Fail what may not be answered by the version that serves from now on."""
        for sequence in self._outdated(self.version):
            sequence.aborted = True
            _fail(sequence, VersionUnavailable(self._unavailable(sequence.request)))

    def _fault(self, error: EngineError) -> None:
        """Fail everything in flight after a bug or a lack of memory; the next requests start clean."""
        self.gauges.faults_total += 1
        with self._wake:
            sequences = self._in_flight()
            self._waiting.clear()
        self._batch.clear()
        for sequence in sequences:
            _fail(sequence, error)

    def _end_all(self) -> None:
        self._abort_all()
        with self._wake:
            commands, self._commands = self._commands, []
            self._wake.notify_all()
        for command in commands:
            command()


def _fail(sequence: ActiveSequence, error: EngineError) -> None:
    if not sequence.future.done():
        sequence.future.set_exception(error)


def _notify(sequence: ActiveSequence, on_token: OnToken, result: Sampled) -> None:
    try:
        on_token(result)
    except RuntimeError:  # the listener's event loop is gone, and the client with it
        sequence.aborted = True
