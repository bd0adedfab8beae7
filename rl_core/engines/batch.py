"""The sequences that have rows: those that decode, and the one that is being prefilled behind them.

Row i of the cache belongs to `running[i]`; the row after the last is the prefilling sequence's. Owned by the decode
thread; nothing here locks.
"""

from __future__ import annotations

import time

from rl_core.engines.kv import MIXED, KvCache
from rl_core.engines.model import Decoder
from rl_core.engines.request import ActiveSequence
from rl_core.engines.sampling import Sampled, sample
from rl_core.engines.weights import WeightSet


class Batch:
    """Gives rows to sequences, computes, and takes rows back."""

    def __init__(self, weights: WeightSet, *, max_seqs: int, max_len: int, retained: int) -> None:
        config = weights.config
        length = min(max_len, config.max_positions)
        self.running: list[ActiveSequence] = []
        self.prefilling: ActiveSequence | None = None
        self.weights = weights
        self._max_seqs = max_seqs
        self._generation = 0
        self._cache = KvCache(config, weights.dtype, max_seqs, length, retained)
        self._decoder = Decoder(self._cache)

    @property
    def max_len(self) -> int:
        """The longest sequence."""
        return self._cache.max_len

    @property
    def has_room(self) -> bool:
        """Whether another sequence can be admitted now."""
        return self.prefilling is None and len(self.running) < self._max_seqs

    @property
    def members(self) -> list[ActiveSequence]:
        """Every sequence that has a row."""
        return [*self.running, self.prefilling] if self.prefilling is not None else list(self.running)

    @property
    def rows_used(self) -> int:
        """Rows of sequences and of retained prefixes."""
        return len(self.running) + (self.prefilling is not None) + self._cache.kept

    def admit(self, sequence: ActiveSequence) -> int:
        """Give a row to a sequence, starting from the longest prefix that any row holds; that prefix's length."""
        row, known = len(self.running), sequence.tokens[:-1]
        source, length = self._cache.longest_prefix(known, active=row, generation=self._generation)
        self._cache.clear(row, generation=self._generation)
        if length:
            self._cache.copy(source, row, length=length)
        if length == len(known):
            self.running.append(sequence)
        else:
            self.prefilling = sequence
        return length

    def prefill(self, count: int) -> int:
        """Compute up to `count` more tokens of the prefilling sequence, and return how many it was.

        Its last token is left to the decode step.
        """
        sequence = self.prefilling
        if sequence is None:
            return 0
        row, known = len(self.running), len(sequence.tokens) - 1
        start = self._cache.rows[row].length
        end = min(start + count, known)
        self._decoder.prefill(self.weights, row=row, tokens=sequence.tokens[start:end])
        if end == known:
            self.running.append(sequence)
            self.prefilling = None
        return end - start

    def decode(self) -> tuple[list[Sampled], float]:
        """Feed each running sequence its last token and draw the next; and the seconds it took."""
        started = time.perf_counter()
        logits = self._decoder.decode(self.weights, tokens=[sequence.tokens[-1] for sequence in self.running])
        results = sample(logits, [sequence.draw() for sequence in self.running])
        return results, time.perf_counter() - started

    def release(self, row: int) -> ActiveSequence:
        """Take an ended sequence out of its row, and retain the row for later prefixes."""
        sequence = self._keep_routes(row)
        self._cache.retain(row, generation=self._generation)
        self._vacate(row)
        return sequence

    def swap(self, weights: WeightSet, *, recompute: bool) -> list[ActiveSequence]:
        """Go over to other weights; the sequences that lost their rows, to be admitted again.

        With `recompute` all do; without, those that have sampled nothing yet: nothing of theirs need be of two
        versions. The others go on over the keys and values they have. Every retained prefix is dropped.
        """
        self.weights = weights
        self._generation += 1
        self._cache.drop_retained()
        back = [self.prefilling] if self.prefilling is not None else []
        self.prefilling = None
        for row in reversed(range(len(self.running))):
            if recompute or self.running[row].sampled == 0:
                back.append(self._keep_routes(row))
                self._vacate(row)
            else:
                self._cache.rows[row].generation = MIXED
        return sorted(back, key=lambda sequence: sequence.serial)

    def clear(self) -> None:
        """Forget every sequence and every prefix."""
        self.running, self.prefilling = [], None
        self._cache.drop_retained()

    def _keep_routes(self, row: int) -> ActiveSequence:
        sequence = self.running[row]
        if sequence.sampled:
            sequence.keep_routes(self._cache.routes[row, : self._cache.rows[row].length])
        return sequence

    def _vacate(self, row: int) -> None:
        """Close the gap that a row leaves: the last running one moves into it, the prefilling one behind them."""
        last = len(self.running) - 1
        if row != last:
            self._cache.copy(last, row)
            self.running[row] = self.running[last]
        self.running.pop()
        if self.prefilling is not None:
            self._cache.copy(last + 1, last)
