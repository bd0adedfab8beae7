"""What the sidecar tells of its slot in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.engines.vllm.messages import WorkerStatus


@dataclass(slots=True)
class Counters:
    """What the sidecar counts itself."""

    requests_total: int = 0
    aborted_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    swaps_total: int = 0
    faults_total: int = 0
    last_pause_s: float = 0.0


def shadow_bytes(workers: Sequence[WorkerStatus]) -> int:
    """Bytes of all workers' shadows."""
    return sum(worker.shadow_bytes for worker in workers)


def slot_numbers(workers: Sequence[WorkerStatus], *, in_flight: int, max_seqs: int) -> dict[str, float]:
    """What vLLM tells: of its requests all, of its steps those of the first worker."""
    first = workers[0] if workers else None
    return {
        "running": min(in_flight, max_seqs),
        "waiting": max(in_flight - max_seqs, 0),
        "shadow_bytes": shadow_bytes(workers),
        "workers": len(workers),
        "decode_steps_total": first.decode_steps_total if first else 0,
        "decode_step_median_s": first.decode_step_median_s if first else 0.0,
        "decode_step_max_s": first.decode_step_max_s if first else 0.0,
        "busy_s_total": first.busy_s_total if first else 0.0,
    }
