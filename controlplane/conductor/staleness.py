"""How many groups may be admitted, in which order, and which are too old. Pure arithmetic."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a stage has and may have, in groups. `version` counts the steps the stage has published."""

    steps: int
    prompts_per_step: int
    max_staleness: int
    max_concurrent: int
    version: int
    running: int
    accepted: int

    @property
    def capacity(self) -> int:
        """How many groups to admit now.

        Source: AReaL (arXiv 2505.24298), its staleness manager: a group admitted now is consumed at the latest by
        step `(accepted + running) // P`, which may be at most `max_staleness` ahead of the version that starts it.
        Ours ends with the stage: no group is admitted that no step will consume.
        """
        taken = self.accepted + self.running
        return max(
            0,
            min(
                self.max_concurrent - self.running,
                (self.max_staleness + self.version + 1) * self.prompts_per_step - taken,
                self.steps * self.prompts_per_step - taken,
            ),
        )


def staleness(*, head_number: int, oldest_number: int) -> int:
    """Versions between the oldest token's policy and the head. Numbers go on over epochs."""
    return head_number - oldest_number


def task_index(*, seed: int, stage: int, position: int, count: int) -> int:
    """Which task of `count` stands at an admission position: each pass over them is a fresh seeded shuffle."""
    lap, offset = divmod(position, count)
    return _shuffle(seed, stage, lap, count)[offset]


@lru_cache(maxsize=16)
def _shuffle(seed: int, stage: int, lap: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{stage}/{lap}").shuffle(order)
    return tuple(order)
