"""The worker extension with faults in it: loads that stop or break off half-way, and a shadow that was spoilt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from rl_core.engines.vllm.worker import DeltaWorkerExtension
from rl_core.store import open_store


class FaultyWorkerExtension(DeltaWorkerExtension):
    rank: int

    def slipway_of_rank(self, rank: str, method: str, *arguments: str) -> None:
        """Call one of these methods in one rank alone."""
        if self.rank == int(rank):
            getattr(self, method)(*arguments)

    def slipway_break_loads(self, times: str) -> None:
        """Let the next `times` loads fail after half of their tensors."""
        self._half_way(int(times), _break)

    def slipway_hold_load(self, gate: str, then: str) -> None:
        """Let the next load make the file `gate` half-way and wait until it is gone, then go on, or `break`."""

        def hold() -> None:
            Path(gate).touch()
            while Path(gate).exists():
                time.sleep(0.01)
            if then == "break":
                _break()

        self._half_way(1, hold)

    def _half_way(self, times: int, act: Callable[[], None]) -> None:
        model = self.model_runner.get_model()
        load, left = model.load_weights, [times]

        def acting(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights[: len(weights) // 2]
            act()
            yield from weights[len(weights) // 2 :]

        def load_so(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            left[0] -= 1
            return load(acting(list(weights)) if left[0] >= 0 else weights)

        model.load_weights = load_so

    def slipway_use_store(self, url: str) -> None:
        """Fetch from another store."""
        self.weight_transfer_engine._store = open_store(url)

    def slipway_spoil_shadow(self) -> None:
        """Flip a bit of the shadow, as broken memory would."""
        shadow = self.weight_transfer_engine._shadow
        shadow.tensors["model.layers.0.self_attn.v_proj.weight"].view(torch.int16)[0, 0] ^= 1


def _break() -> None:
    raise MemoryError("no memory is left for the other half")
