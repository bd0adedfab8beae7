"""Counters of one scheduler, and their Prometheus text."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_STEPS_AFTER_SWAP: Final = 2


@dataclass(slots=True)
class Gauges:
    """What a scheduler counts. Written by its thread alone, read by anyone."""

    requests_total: int = 0
    aborted_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    busy_s_total: float = 0.0
    decode_steps_total: int = 0
    swaps_total: int = 0
    faults_total: int = 0
    last_pause_s: float = 0.0
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    update_gap_s: float = 0.0
    _watched_steps: float = 0
    _stepped_at: float | None = None

    def stepped(self, seconds: float, *, more: bool) -> None:
        """A decode step has ended that took so long; `more`: sequences still run."""
        self.decode_steps_total += 1
        self.step_times_s.append(seconds)
        now = time.perf_counter()
        if self._watched_steps > 0 and self._stepped_at is not None:
            self.update_gap_s = max(self.update_gap_s, now - self._stepped_at)
            self._watched_steps -= 1
        self._stepped_at = now if more else None

    def update_begins(self) -> None:
        """From now on the longest time between the ends of two decode steps is kept, until soon after the swap."""
        self.update_gap_s, self._watched_steps = 0.0, math.inf

    def swapped(self, pause_s: float) -> None:
        """The flip has happened, and took so long."""
        self.swaps_total += 1
        self.last_pause_s = pause_s
        self._watched_steps = _STEPS_AFTER_SWAP

    def snapshot(self) -> dict[str, float]:
        """Flat numbers, step times as median and largest of the last 512."""
        steps = list(self.step_times_s)
        return {
            "requests_total": self.requests_total,
            "aborted_total": self.aborted_total,
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "generated_tokens_total": self.generated_tokens_total,
            "busy_s_total": self.busy_s_total,
            "decode_steps_total": self.decode_steps_total,
            "decode_step_median_s": statistics.median(steps) if steps else 0.0,
            "decode_step_max_s": max(steps, default=0.0),
            "swaps_total": self.swaps_total,
            "faults_total": self.faults_total,
            "last_pause_s": self.last_pause_s,
            "update_gap_s": self.update_gap_s,
        }


def prometheus_text(slots: Mapping[str, Mapping[str, Any]], *, uptime_s: float) -> str:
    """Prometheus' text form of each slot's numbers."""
    lines = ["# TYPE slipway_engine_uptime_s gauge", f"slipway_engine_uptime_s {uptime_s:.3f}"]
    names = sorted({name for numbers in slots.values() for name in numbers})
    for name in names:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE slipway_engine_{name} {kind}")
        lines += [f'slipway_engine_{name}{{slot="{slot}"}} {slots[slot][name]}' for slot in sorted(slots)]
    return "\n".join(lines) + "\n"
