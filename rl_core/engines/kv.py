"""The key/value cache: one row per sequence, and reuse of common prefixes.

Rows `[0, A)` belong to the A running sequences, in the order of the decode batch, so that a decode step reads them as
one view without gathering. Row A is being prefilled. Finished rows are copied to the retained area behind `max_seqs`
and leave it least recently used first. A row may serve as a prefix only if all of it was computed by the weights that
serve now: its `generation` says by which.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.engines.config import ModelConfig

# The generation of a row that weights of several generations wrote: never a prefix for anything.
MIXED: Final = -1


@dataclass(slots=True)
class Row:
    """What a row holds: how many computed tokens, and which generation of weights computed them."""

    length: int = 0
    generation: int = MIXED


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system gives only when they are written: rows never used cost nothing."""
    width = np.uint16 if dtype.itemsize == 2 else np.uint32
    return torch.from_numpy(np.zeros(shape, width)).view(dtype)


@dataclass
class KvCache:
    """Keys and values `[layers, rows, kv_heads, max_len, head_dim]`, and the routes and tokens they belong to."""

    config: ModelConfig
    dtype: torch.dtype
    max_seqs: int
    max_len: int
    retained: int
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)
    routes: NDArray[np.unsignedinteger] = field(init=False)
    tokens: NDArray[np.int32] = field(init=False)
    rows: list[Row] = field(init=False)
    _idle: list[int] = field(init=False)
    _kept: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        count, config = self.max_seqs + self.retained, self.config
        shape = (config.layers, count, config.kv_heads, self.max_len, config.head_dim)
        self.keys, self.values = _zeros(shape, self.dtype), _zeros(shape, self.dtype)
        expert = np.uint8 if config.experts <= 256 else np.dtype("<u2")
        self.routes = np.zeros((count, self.max_len, config.layers, config.top_k), expert)
        self.tokens = np.full((count, self.max_len), -1, np.int32)
        self.rows = [Row() for _ in range(count)]
        self._idle = list(range(self.max_seqs, count))

    @property
    def kept(self) -> int:
        """How many finished rows are retained."""
        return len(self._kept)

    def clear(self, row: int, *, generation: int) -> None:
        """Empty a row for tokens of `generation`."""
        self.rows[row] = Row(0, generation)

    def extend(self, row: int, tokens: list[int]) -> None:
        """Note that the keys and values of `tokens` now stand behind those of the row."""
        state = self.rows[row]
        self.tokens[row, state.length : state.length + len(tokens)] = tokens
        state.length += len(tokens)

    def copy(self, source: int, target: int, *, length: int | None = None) -> None:
        """Make `target` hold the first `length` tokens of `source` (all by default)."""
        state = self.rows[source]
        n = state.length if length is None else length
        self.keys[:, target, :, :n] = self.keys[:, source, :, :n]
        self.values[:, target, :, :n] = self.values[:, source, :, :n]
        self.tokens[target, :n] = self.tokens[source, :n]
        if self.config.routed:
            self.routes[target, :n] = self.routes[source, :n]
        self.rows[target] = Row(n, state.generation)

    def longest_prefix(self, tokens: list[int], *, active: int, generation: int) -> tuple[int, int]:
        """Row and length of the longest common prefix among running and retained rows; length 0 when none."""
        candidates = [r for r in (*range(active), *self._kept) if self.rows[r].generation == generation]
        if not candidates or not tokens:
            return 0, 0
        wanted = np.asarray(tokens, np.int32)
        equal = self.tokens[candidates, : len(wanted)] == wanted
        common = np.where(equal.all(axis=1), len(wanted), equal.argmin(axis=1))
        lengths = np.minimum(common, [self.rows[row].length for row in candidates])
        best = int(lengths.argmax())
        row = candidates[best]
        if row in self._kept:
            self._kept.move_to_end(row)
        return row, int(lengths[best])

    def retain(self, row: int, *, generation: int) -> None:
        """Keep a copy of a finished row for later prefixes, unless other weights wrote any of it."""
        state = self.rows[row]
        if not self.retained or state.length == 0 or state.generation != generation:
            return
        target = self._superseded(row)
        if target is None:
            target = self._idle.pop() if self._idle else self._kept.popitem(last=False)[0]
        self.copy(row, target)
        self._kept[target] = None
        self._kept.move_to_end(target)

    def drop_retained(self) -> None:
        """Forget every finished row."""
        self._idle.extend(self._kept)
        self._kept.clear()

    def _superseded(self, row: int) -> int | None:
        """A retained row that is a prefix of this one, such as the session's turn before."""
        for kept in self._kept:
            n = self.rows[kept].length
            if n <= self.rows[row].length and np.array_equal(self.tokens[kept, :n], self.tokens[row, :n]):
                return kept
        return None
