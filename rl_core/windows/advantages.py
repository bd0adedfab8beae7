"""What one production answer is worth: its reward against what such answers to such users usually get.

Users see one answer to a prompt, so that there is no group of attempts to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.specs import AdvantageKind
from rl_core.windows.shrinkage import UNKNOWN, others_offsets


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer: its reward, how much it counts, and what it is compared with. An empty name is compared with all."""

    reward: float
    weight: float = 1.0
    stratum: str = UNKNOWN
    user: str = UNKNOWN


def window_advantages(kind: AdvantageKind, attempts: Sequence[Attempt], *, user_offset: bool = True) -> list[float]:
    """Advantages of single attempts under `RESPONDERS` or `STRATA`. Shapes: [B] → [B]."""
    if not attempts:
        return []
    centred = responders(attempts)
    return strata(centred, attempts, user_offset=user_offset) if kind is AdvantageKind.STRATA else centred


def responders(attempts: Sequence[Attempt]) -> list[float]:
    """Reward minus the weighted mean of all: weighted, the advantages add up to 0.

    Source: the batch baseline of Hu et al. 2025, REINFORCE++ (arXiv:2501.03262); ours does not divide by the deviation.
    """
    total = sum(attempt.weight for attempt in attempts)
    mean = sum(attempt.weight * attempt.reward for attempt in attempts) / total
    return [attempt.reward - mean for attempt in attempts]


def strata(centred: Sequence[float], attempts: Sequence[Attempt], *, user_offset: bool) -> list[float]:
    """What is left of centred rewards after their stratum's offset, and then after their user's.

    Prompts differ in how hard they are, and users in how strict: neither says anything of the policy. Both offsets
    are those of the others, shrunken (`shrinkage`): small strata fall back on everybody's mean, and where strata or
    users do not differ this is `responders`. That an attempt does not enter its own baseline leaves the gradient
    unbiased, as in Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740), eq. 8, the case without shrinkage.
    """
    offsets = others_offsets(centred, [attempt.stratum for attempt in attempts])
    rest = [value - offset for value, offset in zip(centred, offsets, strict=True)]
    if not user_offset:
        return rest
    offsets = others_offsets(rest, [attempt.user for attempt in attempts])
    return [value - offset for value, offset in zip(rest, offsets, strict=True)]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Attempts at one simulated task: reward minus their mean. Source: Dr. GRPO, see `rl_core.trainer.advantages`."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
