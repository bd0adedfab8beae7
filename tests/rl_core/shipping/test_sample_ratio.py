"""The sample ratio's p-value: a kept library's numbers, and what mixing must keep true."""

from __future__ import annotations

import pytest

from rl_core.errors import SpecError
from rl_core.shipping.sample_ratio import PRIOR, RatioPrior, sample_ratio, sample_ratio_over


@pytest.mark.parametrize(
    ("n_promoted", "n_canary", "share", "concentration", "p"),
    [
        # savvi 0.3.1, Multinomial(theta_0=[1 - share, share], k=concentration).
        (500, 450, 0.5, 100, 0.9859863004686567),
        (9900, 140, 0.01, 1000, 0.00615423999773958),
        (51_000, 49_000, 0.5, 6000, 2.6840790001785073e-08),
        (70, 30, 0.4, 20, 0.39367867159315995),
    ],
)
def test_one_prior_gives_the_numbers_of_a_library(n_promoted, n_canary, share, concentration, p):
    prior = RatioPrior(1.0, 0.0, (concentration * share * (1 - share)) ** -0.5)
    assert sample_ratio(n_promoted, n_canary, share, prior=[prior]) == pytest.approx(p, rel=1e-6)


def test_under_the_intended_share_the_evidence_is_one_on_average():
    # The sum over all counts of 40 users of P(count) / p is the martingale's mean, 1. Where p is capped at 1 the
    # evidence was smaller, so the sum may only be larger.
    share, users = 0.3, 40
    total, chance = 0.0, (1 - share) ** users
    for canary in range(users + 1):
        p = sample_ratio(users - canary, canary, share, prior=[RatioPrior(1.0, 0.0, 5.0)])
        total += chance * (1 / p if p < 1 else 0.0)
        chance *= (users - canary) / (canary + 1) * share / (1 - share)
    assert 0.5 < total <= 1.0


def test_nobody_is_no_evidence():
    assert sample_ratio(0, 0, 0.5) == 1.0
    assert sample_ratio_over([], planned=4) == 1.0


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
def test_arms_as_intended_are_believed_and_gross_errors_are_found_soon(share):
    users = 20_000
    assert sample_ratio(round(users * (1 - share)), round(users * share), share) == 1.0
    assert sample_ratio(round(users * (1 - 1.5 * share)), round(users * 1.5 * share), share) < 1e-4
    assert sample_ratio(round(users * (1 - 0.5 * share)), round(users * 0.5 * share), share) < 1e-4


def test_it_is_the_same_seen_from_the_other_arm():
    assert sample_ratio(5100, 4900, 0.5) == pytest.approx(sample_ratio(4900, 5100, 0.5))


def test_the_worst_stratum_counts_for_as_many_as_are_planned():
    worst = sample_ratio(5300, 4700, 0.5)
    strata = [(0, 0.05, 9500, 500), (1, 0.5, 5300, 4700)]
    assert sample_ratio_over(strata, planned=4) == pytest.approx(4 * worst)
    assert sample_ratio_over(strata, planned=1) == pytest.approx(2 * worst)


def test_a_share_or_a_prior_that_is_none_is_refused():
    with pytest.raises(SpecError, match="share"):
        sample_ratio(1, 1, 1.0)
    with pytest.raises(SpecError, match="sum to 1"):
        sample_ratio(1, 1, 0.5, prior=PRIOR[:1])
