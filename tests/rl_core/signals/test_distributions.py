"""Two samples of one distribution seldom differ by the test; two of different ones do, by the effect that is there."""

import random

import pytest

from rl_core.signals.distributions import difference


def test_known_values():
    # D of these is 3/5; the asymptotic p with Stephens' correction is that of scipy's 'asymp' within its correction
    found = difference([1, 2, 3, 4, 5], [4, 5, 6, 7, 8])
    assert found.effect == pytest.approx(0.6)
    assert (found.mean_first, found.mean_second, found.n_first, found.n_second) == (3, 6, 5, 5)
    assert found.p == pytest.approx(0.2090, abs=2e-3)


def test_equal_samples_do_not_differ_and_apart_ones_do():
    same = difference([1, 1, 2], [1, 1, 2])
    assert (same.effect, same.p) == (0.0, 1.0)
    apart = difference([0.0] * 50, [1.0] * 50)
    assert apart.effect == 1.0
    assert apart.p < 1e-9
    assert difference([], [1.0]) is None


@pytest.mark.parametrize("law", [lambda luck: luck.gauss(0, 1), lambda luck: float(luck.random() < 0.1)])
def test_the_test_holds_its_level(law):
    luck = random.Random(7)
    ps = [difference([law(luck) for _ in range(80)], [law(luck) for _ in range(120)]).p for _ in range(400)]
    assert sum(p < 0.05 for p in ps) / len(ps) < 0.075


def test_a_shift_is_found_with_its_size():
    luck = random.Random(3)
    first = [float(luck.random() < 0.1) for _ in range(1500)]
    second = [float(luck.random() < 0.3) for _ in range(1500)]
    found = difference(first, second)
    assert found.p < 1e-6
    assert found.effect == pytest.approx(0.2, abs=0.05)
