"""How much each answer counts when not everybody answers, and not at random."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.windows.shrinkage import group_offsets


def answer_weights(strata: Sequence[str], answered: Sequence[bool], *, cap: float) -> list[float]:
    """One over the response rate of each one's stratum, as a multiple of everybody's rate; at most `cap`.

    Those who answer then stand for those of their stratum who did not.
    Source: Horvitz & Thompson 1952; the cap is that of Ionides 2008, "Truncated Importance Sampling". A stratum's rate
    is shrunken to everybody's, see `shrinkage`. Shapes: [B] each → [B]; 1 where nobody answered.
    """
    if not any(answered):
        return [1.0] * len(strata)
    rate = sum(answered) / len(answered)
    offsets = group_offsets([float(one) - rate for one in answered], strata)
    return [rate / max(rate + offsets.get(stratum, 0.0), rate / cap) for stratum in strata]


def normalised(weights: Sequence[float]) -> list[float]:
    """The same weights with mean 1."""
    if not weights:
        return []
    mean = sum(weights) / len(weights)
    return [weight / mean for weight in weights]


def effective_size(weights: Sequence[float]) -> float:
    """How many equally weighted answers are worth as much. Source: Kish 1965, "Survey Sampling", §8.2."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares if squares > 0 else 0.0
