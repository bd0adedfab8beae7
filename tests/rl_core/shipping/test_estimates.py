"""The difference of two arms, against numbers worked out by hand and against another way to compute it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from outcomes import arms, thumbs

from rl_core.shipping.canary import UserOutcome
from rl_core.shipping.estimates import LEAST_USERS, Contrast, estimate
from rl_core.shipping.peeking import prefixes
from rl_core.shipping.simulation import Ledger


def contrast(*args, **kwargs) -> Contrast:
    found = estimate(*args, **kwargs).contrast
    assert found is not None
    return found


def test_two_arms_by_hand():
    rows = arms(users=10, promoted=0.6, canary=0.4)
    found = contrast(rows)
    assert (found.mean_promoted, found.mean_canary) == pytest.approx((0.6, 0.4))
    assert found.difference == pytest.approx(-0.2)
    assert found.variance == pytest.approx(2 * (10 * 0.24 / 9) / 10)  # both arms have a sample variance of 2.4 / 9


def test_the_range_counts_as_one_further_user_in_each_arm():
    rows = arms(users=20, promoted=0.5, canary=0.5)
    assert contrast(rows, span=1.0).variance - contrast(rows).variance == pytest.approx(2 / 20**2)


def test_an_arm_without_a_rare_value_borrows_the_others_spread():
    rows = arms(users=50, promoted=0.02, canary=0.0, share=0.1)
    pooled = (450 * 0.02 * 0.98) / (449 + 49)
    assert contrast(rows).variance == pytest.approx(450 * 0.02 * 0.98 / 449 / 450 + pooled / 50)


def test_a_user_counts_once_however_much_they_wrote():
    rows = arms(users=10, promoted=0.5, canary=0.5)
    rows[0] = UserOutcome(stratum=0, arm="promoted", total=1000 * rows[0].total, count=1000)
    assert contrast(rows) == contrast(arms(users=10, promoted=0.5, canary=0.5))


def test_strata_keep_a_drift_over_time_out_of_the_difference():
    # Everybody grows more content while the canary's share rises: pooled, the canary would look better by 0.16.
    rows = arms(users=20, promoted=0.2, canary=0.2, share=0.05) + arms(
        users=200, promoted=0.8, canary=0.8, stratum=1, share=0.5
    )
    pooled = [sum(row.total for row in rows if row.arm == arm) for arm in ("promoted", "canary")]
    assert pooled[1] / 220 - pooled[0] / 580 > 0.15
    assert contrast(rows).difference == pytest.approx(0.0, abs=1e-12)


def test_a_user_who_returns_is_no_new_user():
    once = thumbs(users=40, up=0.5, arm="promoted", named=True) + thumbs(users=40, up=0.5, arm="canary", named=True)
    again = [UserOutcome(stratum=1, arm=row.arm, total=row.total, count=1, user=row.user) for row in once]
    nameless = [UserOutcome(stratum=row.stratum, arm=row.arm, total=row.total, count=1) for row in once + again]
    assert contrast(once + again).variance == pytest.approx(contrast(once).variance)
    assert contrast(nameless).variance == pytest.approx(contrast(once).variance / 2)
    found = estimate(once + again)
    assert (found.n_promoted, found.n_canary, found.fewest_latest) == (40, 40, 40)


def test_users_who_change_arms_are_counted_in_both_and_their_taste_cancels():
    rng = random.Random(3)
    tastes = [rng.random() for _ in range(400)]
    rows = []
    for number, taste in enumerate(tastes):
        arm = ("promoted", "canary") if number % 2 else ("canary", "promoted")
        rows += [UserOutcome(stratum=s, arm=arm[s], total=taste, count=1, user=str(number)) for s in range(2)]
    found = estimate(rows)
    assert (found.n_promoted, found.n_canary) == (400, 400)
    assert found.contrast is not None
    assert found.contrast.difference == pytest.approx(0.0, abs=1e-12)
    nameless = [UserOutcome(stratum=row.stratum, arm=row.arm, total=row.total, count=1) for row in rows]
    assert found.contrast.variance < 0.02 * contrast(nameless).variance


def test_equal_weights_of_any_size_change_nothing():
    rows = arms(users=30, promoted=0.5, canary=0.4)
    heavy = [UserOutcome(stratum=0, arm=row.arm, total=row.total, count=1, weight=7.0) for row in rows]
    assert contrast(heavy).variance == pytest.approx(contrast(rows).variance)
    assert contrast(heavy).difference == pytest.approx(contrast(rows).difference)


def test_a_user_of_weight_two_is_worth_two_of_the_mean_but_not_of_the_certainty():
    rows = arms(users=30, promoted=0.5, canary=0.5)
    tilted = [
        UserOutcome(stratum=0, arm=row.arm, total=row.total, count=1, weight=2.0 if row.total else 1.0) for row in rows
    ]
    found = contrast(tilted)
    assert found.mean_canary == pytest.approx(2 / 3)
    # 15 users of weight 2 at 1/3 from the mean and 15 of weight 1 at 2/3, over the squared sum of weights, in each arm.
    assert found.variance == pytest.approx(2 * (15 * (2 / 3) ** 2 + 15 * (2 / 3) ** 2) / 45**2 * 30 / 29)


def test_too_few_users_say_nothing_but_are_counted():
    few = arms(users=LEAST_USERS - 1, promoted=0.5, canary=0.5)
    found = estimate(few)
    assert found.contrast is None
    assert (found.n_promoted, found.n_canary, found.fewest_latest) == (LEAST_USERS - 1,) * 3
    assert estimate([]).contrast is None
    assert estimate(arms(users=LEAST_USERS, promoted=0.5, canary=0.5)).contrast is not None


def test_a_latest_stratum_that_nobody_answered_in_has_no_users():
    assert estimate(arms(users=20, promoted=0.5, canary=0.5), latest=1).fewest_latest == 0


def test_rows_without_values_or_weight_are_left_out():
    rows = arms(users=20, promoted=0.5, canary=0.4)
    empty = [
        UserOutcome(stratum=0, arm="canary", total=0.0, count=0),
        UserOutcome(stratum=0, arm="canary", total=1.0, count=1, weight=0.0),
    ]
    assert estimate(rows + empty) == estimate(rows)


def test_the_simulations_ledger_gives_the_same_numbers():
    rng = np.random.default_rng(5)
    users, steps = 300, np.array([0.1, 0.3, 0.5])
    canary_US = rng.random(users)[:, None] < steps[None, :]
    ledger = Ledger(canary_US, span=1.0)
    for step in range(3):
        for _ in range(4):
            came = rng.integers(0, users, 120)
            ledger.add(came, step, rng.random(came.size) < 0.3 + 0.001 * came)
    rows = [
        UserOutcome(
            stratum=step,
            arm="canary" if canary_US[user, step] else "promoted",
            total=float(ledger.totals_US[user, step]),
            count=int(ledger.counts_US[user, step]),
            user=str(user),
        )
        for user in range(users)
        for step in range(3)
    ]
    theirs, ours = ledger.estimate(2), estimate(rows, span=1.0)
    assert (theirs.n_promoted, theirs.n_canary, theirs.fewest_latest) == (
        ours.n_promoted,
        ours.n_canary,
        ours.fewest_latest,
    )
    assert theirs.contrast is not None
    assert ours.contrast is not None
    for field in Contrast.__struct_fields__:
        assert getattr(theirs.contrast, field) == pytest.approx(getattr(ours.contrast, field), rel=1e-9), field


@pytest.mark.parametrize("span", [0.0, 1.0])
def test_the_prefixes_of_a_stream_give_the_same_numbers(span):
    rng = np.random.default_rng(6)
    values_N, canary_N = rng.lognormal(size=200), rng.random(200) < 0.3
    difference_N, variance_N = prefixes(values_N, canary_N, span=span)
    rows = [
        UserOutcome(stratum=0, arm="canary" if canary else "promoted", total=float(value), count=1)
        for value, canary in zip(values_N, canary_N, strict=True)
    ]
    assert np.isnan(variance_N[8])
    for n in (60, 101, 200):
        found = contrast(rows[:n], span=span)
        assert (difference_N[n - 1], variance_N[n - 1]) == pytest.approx((found.difference, found.variance), rel=1e-9)
