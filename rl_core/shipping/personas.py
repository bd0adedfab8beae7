"""Simulated users whose persona decides how often they answer: what it does to a difference, and what weights undo.

Needs numpy, as simulations do.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from rl_core.shipping.canary import Responses, UserOutcome, effect, response_weights
from rl_core.shipping.estimates import CANARY, PROMOTED


class Persona(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of user: its part of all users, how often they are content, and how often they answer in each arm."""

    name: str
    part: float
    satisfaction: float
    answers: dict[str, float]


# The candidate is no better and no worse, but it silences the strict.
SILENCED = (
    Persona(name="strict", part=0.5, satisfaction=0.3, answers={PROMOTED: 0.5, CANARY: 0.2}),
    Persona(name="easy", part=0.5, satisfaction=0.7, answers={PROMOTED: 0.6, CANARY: 0.6}),
)


class Bias(msgspec.Struct, frozen=True, kw_only=True):
    """The mean estimated difference over runs, with its standard error, and how often the interval left zero out."""

    mean: float
    error: float
    alarms: int


def persona_bias(*, weighted: bool, users: int, runs: int, alpha: float = 0.05, seed: int = 0) -> Bias:
    """Estimate the difference of two equal arms, of half of the users each, from those who answered."""
    rng = np.random.default_rng(seed)
    differences, alarms = [], 0
    for _ in range(runs):
        seen = effect(_answers(rng, users, weighted=weighted), alpha=alpha)
        if seen.difference is None or seen.low is None or seen.high is None:
            continue
        differences.append(seen.difference)
        alarms += not seen.low <= 0 <= seen.high
    return Bias(
        mean=float(np.mean(differences)),
        error=float(np.std(differences, ddof=1) / len(differences) ** 0.5),
        alarms=alarms,
    )


def _answers(rng: np.random.Generator, users: int, *, weighted: bool) -> list[UserOutcome]:
    served: Counter[tuple[str, str]] = Counter()
    answered: list[tuple[str, str, float]] = []
    kinds = rng.choice(len(SILENCED), size=users, p=[persona.part for persona in SILENCED])
    for kind, coin, reply, thumb in zip(kinds, *rng.random((3, users)), strict=True):
        persona, arm = SILENCED[kind], CANARY if coin < 0.5 else PROMOTED
        served[arm, persona.name] += 1
        if reply < persona.answers[arm]:
            answered.append((arm, persona.name, float(thumb < persona.satisfaction)))
    counts = Counter((arm, name) for arm, name, _ in answered)
    weights = response_weights({key: Responses(served=n, answered=counts[key]) for key, n in served.items()})
    return [
        UserOutcome(stratum=0, arm=arm, total=thumb, count=1, weight=weights[arm, name] if weighted else 1.0)
        for arm, name, thumb in answered
    ]
