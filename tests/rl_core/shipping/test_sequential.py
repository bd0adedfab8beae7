"""The bound is the normal mixture's: against a slow integral, a kept library's numbers, and its own promises."""

from __future__ import annotations

import math
import random

import pytest

from rl_core.shipping.canary import UserOutcome, effect
from rl_core.shipping.sequential import radius, scale_for, z_bound


def mixed_likelihood_ratio(distance: float, information: float, scale: float) -> float:
    """Trapezoids over the mixture: the likelihood ratio of every other truth against this one, averaged."""
    steps, width = 20_000, 12 * scale
    total = 0.0
    for step in range(steps + 1):
        other = -width + 2 * width * step / steps
        density = math.exp(-(other**2) / (2 * scale**2)) / (scale * math.sqrt(2 * math.pi))
        ratio = math.exp(information * (other * distance - other**2 / 2))
        total += density * ratio * (0.5 if step in (0, steps) else 1.0)
    return total * 2 * width / steps


@pytest.mark.parametrize("information", [20.0, 400.0, 30_000.0])
@pytest.mark.parametrize("scale", [0.02, 0.1, 0.3])
def test_at_the_bound_the_mixed_likelihood_ratio_is_one_over_alpha(information, scale):
    for alpha in (0.05, 0.001):
        distance = radius(1 / information, alpha=alpha, scale=scale)
        assert mixed_likelihood_ratio(distance, information, scale) == pytest.approx(1 / alpha, rel=1e-4)


@pytest.mark.parametrize(
    ("users", "scale", "low", "high"),
    [
        # savvi 0.3.1, LinearRegression(alpha=0.02, phi=variance / scale²) on the same rows: exact for normal values
        # with an unknown variance (Lindon, Ham, Tingley and Bojinov, 2022), where ours is asymptotic.
        (400, 0.1, -0.002596796968328735, 0.3394700878093664),
        (4000, 0.1, -0.0029667591560382234, 0.10570155332814893),
        (4000, 0.4, -0.00840889895482004, 0.11114369312693075),
    ],
)
def test_intervals_agree_with_a_library_of_anytime_valid_regression(users, scale, low, high):
    rng = random.Random(7)
    arms = (int(rng.random() < 0.5) for _ in range(users))
    rows = [(float(rng.random() < 0.45 + 0.05 * arm), arm) for arm in arms]
    outcomes = [
        UserOutcome(stratum=0, arm="canary" if arm else "promoted", total=value, count=1) for value, arm in rows
    ]
    seen = effect(outcomes, alpha=0.02, scale=scale)
    assert (seen.low, seen.high) == pytest.approx((low, high), abs=0.02 * (high - low) * 400 / users + 1e-5)


def test_a_look_costs_more_than_a_single_test_and_less_with_more_alpha():
    assert z_bound(1000, alpha=0.05, scale=0.1) > 1.96
    assert z_bound(1000, alpha=0.05, scale=0.1) < z_bound(1000, alpha=0.01, scale=0.1)
    assert radius(0.001, alpha=0.05, scale=0.1) > radius(0.0001, alpha=0.05, scale=0.1)


def needed(alpha: float, gap: float, scale: float) -> float:
    """Information at which the half-width is the gap."""
    information = 1.0
    while radius(1 / information, alpha=alpha, scale=scale) > gap:
        information *= 1.001
    return information


@pytest.mark.parametrize("alpha", [0.05, 0.02, 0.005])
def test_the_scale_is_within_a_tenth_of_the_best_at_the_margin_and_at_twice_the_margin(alpha):
    margin = 0.05
    for gap in (margin, 2 * margin):
        best = min(needed(alpha, gap, margin * factor / 10) for factor in range(4, 60, 2))
        assert needed(alpha, gap, scale_for(margin)) < 1.1 * best
