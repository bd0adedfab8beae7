"""Makers of rows that canaries are judged on."""

from __future__ import annotations

import random

from rl_core.shipping.canary import UserOutcome
from rl_core.shipping.specs import CanarySpec, Direction, MetricRole, MetricSource, MetricSpec


def thumbs(
    *, users: int, up: float, arm: str, stratum: int = 0, seed: int = 0, named: bool = False
) -> list[UserOutcome]:
    """`users` rows of one thumb each, the nearest whole number of them up, in random order."""
    values = [1.0] * round(users * up) + [0.0] * (users - round(users * up))
    random.Random(seed).shuffle(values)
    return [
        UserOutcome(stratum=stratum, arm=arm, total=value, count=1, user=f"{arm}{number}" if named else "")
        for number, value in enumerate(values)
    ]


def arms(*, users: int, promoted: float, canary: float, stratum: int = 0, share: float = 0.5) -> list[UserOutcome]:
    """Both arms of one stratum, `users` in the canary."""
    others = round(users * (1 - share) / share)
    return thumbs(users=others, up=promoted, arm="promoted", stratum=stratum) + thumbs(
        users=users, up=canary, arm="canary", stratum=stratum
    )


def metric(name: str = "thumbs", **changes: object) -> MetricSpec:
    """A goal of thumbs, with changes."""
    fields: dict[str, object] = {
        "source": MetricSource.SIGNAL,
        "key": "thumbs",
        "role": MetricRole.GOAL,
        "direction": Direction.HIGHER,
        "margin": 0.05,
    }
    return MetricSpec(name=name, **(fields | changes))


def guardrail(name: str = "failures", **changes: object) -> MetricSpec:
    """A guardrail of failures, with changes."""
    fields: dict[str, object] = {
        "source": MetricSource.FAILURE,
        "key": "",
        "role": MetricRole.GUARDRAIL,
        "direction": Direction.LOWER,
        "margin": 0.02,
    }
    return metric(name, **(fields | changes))


def canary(*metrics: MetricSpec, **changes: object) -> CanarySpec:
    """A canary with those metrics."""
    return CanarySpec(metrics=metrics or (metric(),), **changes)
