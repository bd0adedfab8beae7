"""Whether the arms of a canary have the sizes that their shares say, checked after every user.

Source: Lindon and Malek, "Anytime-valid inference for multinomial count data" (NeurIPS 2022; first as "Sequential
testing of multinomial hypotheses", 2020): the Bayes factor of a Dirichlet prior against the intended shares is a
martingale under them, so one over it is a p-value at all looks together (Ville). Ours has two arms and so Beta priors,
and mixes three: no single prior around the intended share finds a split of 51:49 among 100,000 users as surely
(`rl_core.shipping.claims.ratio_claims`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rl_core.errors import SpecError


class RatioPrior(msgspec.Struct, frozen=True):
    """One Beta prior of the canary's true share: its part of the mixture, and where it lies in log-odds.

    `shift` is the distance of its mean from the intended share's log-odds, `deviation` its width there.
    """

    part: float
    shift: float
    deviation: float


# One arm loses 3 % of its users (log-odds ±0.03), the least that is worth finding; or something grosser.
PRIOR = (RatioPrior(0.45, 0.03, 0.006), RatioPrior(0.45, -0.03, 0.006), RatioPrior(0.1, 0.0, 0.25))


def sample_ratio(n_promoted: int, n_canary: int, share: float, *, prior: Sequence[RatioPrior] = PRIOR) -> float:
    """The p-value of `n_canary` of all users where the intended share is `share`; valid at every look.

    Raises: SpecError for a share outside (0, 1) or parts that do not sum to 1.
    """
    if not 0 < share < 1:
        raise SpecError(f"a share must be in (0, 1), not {share}")
    if abs(sum(one.part for one in prior) - 1) > 1e-9:
        raise SpecError("the parts of a prior must sum to 1")
    logs = [math.log(one.part) + _log_factor(n_promoted, n_canary, share, one) for one in prior]
    highest = max(logs)
    log_evidence = highest + math.log(sum(math.exp(one - highest) for one in logs))
    return math.exp(min(0.0, -log_evidence))


def sample_ratio_over(exposures: Sequence[tuple[int, float, int, int]], *, planned: int) -> float:
    """The p-value over strata, given as (stratum, share, n_promoted, n_canary), of `planned` steps.

    A user who returns keeps their place, so strata are not independent and their evidence cannot be multiplied: the
    smallest p-value counts, times the number of strata.
    """
    values = [sample_ratio(promoted, canary, share) for _, share, promoted, canary in exposures]
    return min(1.0, min(values, default=1.0) * max(planned, len(values)))


def _log_factor(n_promoted: int, n_canary: int, share: float, prior: RatioPrior) -> float:
    """Log of the Beta-binomial likelihood over the binomial one."""
    mean = 1 / (1 + math.exp(-(math.log(share / (1 - share)) + prior.shift)))
    concentration = 1 / (mean * (1 - mean) * prior.deviation**2)
    a, b = concentration * mean, concentration * (1 - mean)
    intended = n_canary * math.log(share) + n_promoted * math.log1p(-share)
    return _log_beta(a + n_canary, b + n_promoted) - _log_beta(a, b) - intended


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
