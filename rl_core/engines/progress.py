"""How far an update has come, with rate and remaining time, for whoever asks for a slot's status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rl_core.engines.protocol import Progress, UpdatePhase

if TYPE_CHECKING:
    from rl_core.delta import Progress as Told


class ProgressMeter:
    """Turns what `reconcile` tells into what a status shows. Told on any thread, read on any."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.now = Progress(phase=UpdatePhase.FETCH, done_bytes=0, total_bytes=0, bytes_per_s=0.0)

    def tell(self, told: Told) -> None:
        """Take what `reconcile` says."""
        self._show(UpdatePhase(told.phase.value), done=told.bytes_done, total=told.bytes_total)

    def at(self, phase: UpdatePhase) -> None:
        """The update has come to a phase that `reconcile` knows nothing of."""
        self._show(phase, done=self.now.done_bytes, total=self.now.total_bytes)

    def _show(self, phase: UpdatePhase, *, done: int, total: int) -> None:
        rate = done / max(time.monotonic() - self._started, 1e-6)
        self.now = Progress(
            phase=phase,
            done_bytes=done,
            total_bytes=total,
            bytes_per_s=rate,
            remaining_s=(total - done) / rate if rate > 0 else None,
        )
