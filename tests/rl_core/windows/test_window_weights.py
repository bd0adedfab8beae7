import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.windows.weights import answer_weights, effective_size, normalised


def test_those_who_seldom_answer_count_more():
    """Two strata of forty: half and a tenth answer. The rates hardly shrink, so that weights are about 0.3/rate."""
    strata = ["often"] * 40 + ["seldom"] * 40
    answered = [number % 2 == 0 for number in range(40)] + [number % 10 == 0 for number in range(40)]
    weights = answer_weights(strata, answered, cap=10.0)
    assert weights[0] == pytest.approx(0.3 / 0.5, rel=0.05)
    assert weights[40] == pytest.approx(0.3 / 0.1, rel=0.25)
    assert weights[40] < 0.3 / 0.1  # shrunken towards everybody's
    assert answer_weights(strata, answered, cap=2.0)[40] == 2.0


def test_equal_rates_and_small_strata_weigh_alike():
    assert answer_weights(["a", "a", "b", "b"], [True, False, True, False], cap=4.0) == [1.0] * 4
    assert answer_weights(["a", "b", "c"], [True, False, False], cap=4.0) == [1.0] * 3
    assert answer_weights(["a", "b"], [False, False], cap=4.0) == [1.0, 1.0]


def test_the_bias_of_those_who_answer_goes():
    """The strict answer four times as often as the kind: the plain mean is too low, the weighted one is not."""
    rng = random.Random(3)
    rows = []
    for user in range(300):
        strict = user % 2 == 0
        for _ in range(20):
            reward = float(rng.random() < (0.3 if strict else 0.8))
            rows.append((f"u{user}", reward, rng.random() < (0.8 if strict else 0.2)))
    truth = sum(reward for _, reward, _ in rows) / len(rows)
    weights = answer_weights([user for user, _, _ in rows], [a for _, _, a in rows], cap=10.0)
    heard = [(w, reward) for w, (_, reward, answered) in zip(weights, rows, strict=True) if answered]
    plain = sum(reward for _, reward in heard) / len(heard)
    weighted = sum(w * reward for w, reward in heard) / sum(w for w, _ in heard)
    assert truth - plain > 0.1
    assert abs(weighted - truth) < 0.03


def test_effective_size():
    assert effective_size([1.0] * 7) == pytest.approx(7)
    assert effective_size([3.0, 1.0]) == pytest.approx(16 / 10)
    assert effective_size([]) == 0.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=120), st.floats(1, 10))
def test_weights_are_positive_and_bounded(rows, cap):
    weights = answer_weights([s for s, _ in rows], [a for _, a in rows], cap=cap)
    assert all(0 < weight <= cap + 1e-9 for weight in weights)
    assert sum(normalised(weights)) == pytest.approx(len(rows))
    assert 1 - 1e-9 <= effective_size(weights) <= len(rows) + 1e-9
