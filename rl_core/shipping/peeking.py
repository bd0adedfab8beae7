"""How often a look at every user raises a false alarm, and what the sample ratio finds. Needs numpy, as simulations do.

Axes: N users in the order of their arrival.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

from rl_core.shipping.canary import effect_of
from rl_core.shipping.estimates import LEAST_USERS
from rl_core.shipping.sample_ratio import sample_ratio
from rl_core.shipping.sequential import z_bound
from rl_core.shipping.simulation import Bools, Floats, Ledger


class Values(StrEnum):
    """How the values of a metric are distributed over users."""

    THUMBS = "thumbs"  # 0 or 1, evenly
    RARE = "rare"  # 1 for one user in a hundred, of a source whose range is known
    UNKNOWN = "rare, range unknown"  # the same, of a source whose range is not
    LATENCY = "latency"  # lognormal: a long tail


class Returning(msgspec.Struct, frozen=True, kw_only=True):
    """Users who come back: `visit` of them in each step, with 1 + Poisson(`more`) values, correlated by `icc`."""

    steps: tuple[float, ...] = (0.05, 0.25, 0.5)
    users: int = 1500
    visit: float = 0.5
    more: float = 3.0
    icc: float = 0.04
    looks: int = 40


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """How many of `runs` simulated streams crossed the line at any look."""

    crossed: int
    runs: int

    @property
    def rate(self) -> float:
        """As a share."""
        return self.crossed / self.runs


def false_alarms(
    values: Values, *, share: float, users: int, runs: int, alpha: float, scale: float, seed: int
) -> Crossing:
    """Streams without a difference whose interval left zero out at any user, from the first possible one on.

    `scale` is in standard deviations of the values.
    """
    rng = np.random.default_rng(seed)
    span = 1.0 if values is Values.RARE else 0.0
    return Crossing(
        crossed=sum(
            _alarmed(
                *prefixes(_draw(values, rng, users), rng.random(users) < share, span=span), alpha, _unit(values, scale)
            )
            for _ in range(runs)
        ),
        runs=runs,
    )


def returning_alarms(crowd: Returning, *, runs: int, alpha: float, scale: float, seed: int) -> Crossing:
    """Releases without a difference whose interval left zero out at any look, with users who return over the steps.

    A user's mean moves while they go on answering, and some change arms when the share rises; `scale` is in standard
    deviations of the values.
    """
    rng = np.random.default_rng(seed)
    return Crossing(crossed=sum(_returning_alarmed(crowd, rng, alpha, scale) for _ in range(runs)), runs=runs)


def _returning_alarmed(crowd: Returning, rng: np.random.Generator, alpha: float, scale: float) -> bool:
    ledger = Ledger(rng.random(crowd.users)[:, None] < np.array(crowd.steps)[None, :])
    taste_U = rng.normal(0.0, crowd.icc**0.5, crowd.users)
    for step in range(len(crowd.steps)):
        came = np.flatnonzero(rng.random(crowd.users) < crowd.visit)
        values = np.repeat(came, 1 + rng.poisson(crowd.more, came.size))
        rng.shuffle(values)
        for part in np.array_split(values, crowd.looks):
            ledger.add(part, step, taste_U[part] + rng.normal(0.0, (1 - crowd.icc) ** 0.5, part.size))
            seen = effect_of(ledger.estimate(step), alpha=alpha, scale=scale)
            if seen.low is not None and seen.high is not None and not seen.low <= 0 <= seen.high:
                return True
    return False


def ratio_alarms(
    true_share: float, *, share: float, users: int, every: int, runs: int, level: float, seed: int
) -> Crossing:
    """Streams whose arms' sizes were found not to fit `share` at any look, `every` so many users."""
    rng = np.random.default_rng(seed)
    crossed = 0
    for _ in range(runs):
        canary_N = rng.binomial(every, true_share, size=users // every).cumsum()
        crossed += any(
            sample_ratio(every * (look + 1) - int(canary), int(canary), share) <= level
            for look, canary in enumerate(canary_N)
        )
    return Crossing(crossed=crossed, runs=runs)


def prefixes(values_N: Floats, canary_N: Bools, *, span: float = 0.0) -> tuple[Floats, Floats]:
    """Difference and variance of `rl_core.shipping.estimates.estimate` after every user of one stratum.

    NaN while an arm has fewer than `LEAST_USERS`.
    """
    arms_AN = np.array([~canary_N, canary_N], dtype=np.float64)
    n_AN = arms_AN.cumsum(1)
    centred_N = values_N - values_N.mean()  # against cancellation
    n_AN[n_AN < LEAST_USERS] = np.nan
    mean_AN = (arms_AN * centred_N).cumsum(1) / n_AN
    squares_AN = np.maximum(0, (arms_AN * centred_N**2).cumsum(1) - n_AN * mean_AN**2)
    pooled_N = squares_AN.sum(0) / (n_AN.sum(0) - 2)
    spread_AN = np.maximum(squares_AN / (n_AN - 1), pooled_N)
    return mean_AN[1] - mean_AN[0], (spread_AN / n_AN + (span / n_AN) ** 2).sum(0)


def _alarmed(difference_N: Floats, variance_N: Floats, alpha: float, scale: float) -> bool:
    with np.errstate(invalid="ignore", divide="ignore"):
        z_N = np.where(variance_N > 0, np.abs(difference_N) / np.sqrt(variance_N), 0.0)
    possible = np.flatnonzero(
        z_N**2 > -2 * np.log(alpha)
    )  # no bound is lower than this, and few are worth the exact one
    return any(z_N[n] > z_bound(1 / variance_N[n], alpha=alpha, scale=scale) for n in possible)


def _draw(values: Values, rng: np.random.Generator, users: int) -> Floats:
    if values is Values.THUMBS:
        return (rng.random(users) < 0.5).astype(np.float64)
    if values is Values.LATENCY:
        return rng.lognormal(0.0, 1.0, users)
    return (rng.random(users) < 0.01).astype(np.float64)


def _unit(values: Values, scale: float) -> float:
    deviation = {Values.THUMBS: 0.5, Values.LATENCY: 2.16, Values.RARE: 0.0995, Values.UNKNOWN: 0.0995}[values]
    return scale * deviation
