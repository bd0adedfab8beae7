"""What every benchmark measures with: interleaved medians and the description of the machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Progress = Callable[[str], None]


def rounds(*, quick: bool) -> int:
    """How often each candidate of a comparison runs: three times when quick, else five."""
    return 3 if quick else 5


def interleaved_medians(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    warmup: bool = True,
) -> dict[str, float]:
    """Median seconds of each candidate, all of them run in turn `repeats` times.

    Taking turns lets a noisy neighbour disturb all candidates alike, so that ratios of the medians hold. `clock` may
    be `time.process_time` for CPU seconds.
    """
    if warmup:
        for candidate in candidates.values():
            candidate()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            started = clock()
            candidate()
            seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_rss_mb() -> float:
    """The most memory that this process has held so far, MB (of 2²⁰ bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def host() -> dict[str, object]:
    """The machine in the form every result carries: usable cores and the processor's name."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cores": len(os.sched_getaffinity(0)), "model": model}
