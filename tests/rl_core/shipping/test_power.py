"""The power that is printed is the power that canaries have."""

from __future__ import annotations

import numpy as np
import pytest

from rl_core.errors import SpecError
from rl_core.shipping.__main__ import main
from rl_core.shipping.peeking import prefixes
from rl_core.shipping.power import Design, power, users_needed
from rl_core.shipping.sequential import radius, scale_for


def decided(design: Design, effect: float, *, users: int, runs: int) -> float:
    """Share of simulated canaries of arms of that size whose last look decides."""
    rng, count = np.random.default_rng(11), 0
    canary_N = np.arange(2 * users) % 2 == 1
    for _ in range(runs):
        values_N = rng.normal(0.0, design.deviation, 2 * users) + effect * canary_N
        difference_N, variance_N = prefixes(values_N, canary_N)
        half = radius(float(variance_N[-1]), alpha=design.alpha, scale=scale_for(design.margin))
        low, high = difference_N[-1] - half, difference_N[-1] + half
        count += bool(high < -design.margin if effect < -design.margin else low > -design.margin)
    return count / runs


@pytest.mark.parametrize("effect", [-0.2, -0.15, 0.05, 0.1])
def test_simulated_canaries_decide_as_often_as_promised(effect):
    design = Design()
    users = users_needed(design, effect, wanted=0.8)
    assert power(design, effect, canary_users=users) == pytest.approx(0.8, abs=0.01)
    assert decided(design, effect, users=users, runs=400) == pytest.approx(0.8, abs=0.06)


def test_the_least_number_is_the_least():
    design = Design()
    users = users_needed(design, -0.15)
    assert power(design, -0.15, canary_users=users) >= 0.9 > power(design, -0.15, canary_users=users - 1)


def test_replies_of_one_user_are_worth_less_than_replies_of_many():
    one, four = Design(), Design(replies=4, icc=0.04)
    ratio = users_needed(four, -0.15) / users_needed(one, -0.15)
    assert ratio == pytest.approx((1 + 0.04 * 3) / 4, rel=0.01)
    assert users_needed(Design(replies=4, icc=1.0), -0.15) == users_needed(one, -0.15)


def test_on_the_margin_nothing_is_decided():
    with pytest.raises(SpecError, match="margin"):
        users_needed(Design(), -0.05)


def test_a_wrong_design_is_refused_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["power", "--margin", "0"])
    assert ended.value.code == 2
    assert "margin" in capsys.readouterr().err
