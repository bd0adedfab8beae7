"""How many groups may be admitted, and which are too old. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


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
