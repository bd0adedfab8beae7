import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.windows.shrinkage import Components, group_offsets, others_offsets, variance_components

# Three groups of five around 0, 1 and 2.
VALUES = [-0.2, -0.1, 0.0, 0.1, 0.2, 0.8, 0.9, 1.0, 1.1, 1.2, 1.8, 1.9, 2.0, 2.1, 2.2]
GROUPS = ["a"] * 5 + ["b"] * 5 + ["c"] * 5


def test_components_by_hand():
    """Within: 3 × 0.1 / 12. Between: (5·1 + 0 + 5·1 − 2·0.025) / (15 − 75/15) = 9.95 / 10."""
    components = variance_components(VALUES, GROUPS)
    assert components.within == pytest.approx(0.025)
    assert components.between == pytest.approx(0.995)
    assert components.credibility(5) == pytest.approx(4.975 / 5.0)
    assert components.credibility(0) == 0.0


def test_offsets_by_hand():
    centred = [value - 1.0 for value in VALUES]
    z5, z4 = 4.975 / 5.0, 3.98 / 4.005
    assert group_offsets(centred, GROUPS) == pytest.approx({"a": -z5, "b": 0.0, "c": z5})
    others = others_offsets(centred, GROUPS)
    # Without itself, the first of a is the mean of −1.1, −1, −0.9, −0.8.
    assert others[0] == pytest.approx(z4 * -0.95)
    assert others[9] == pytest.approx(z4 * -0.05)


def test_equal_sizes_are_the_james_stein_estimator():
    """Positive-part James–Stein towards the mean, σ² known by its pooled estimate: 1 − (G − 1) σ²/n / Σ (mean)²."""
    centred = [value - 1.0 for value in VALUES]
    shrink = 1 - 2 * (0.025 / 5) / 2.0
    assert group_offsets(centred, GROUPS)["c"] == pytest.approx(shrink * 1.0)


def test_groups_that_do_not_differ_have_no_offset():
    rng = random.Random(1)
    values = [0.5, -0.5] * 20
    groups = [str(number // 4) for number in range(40)]
    rng.shuffle(groups)
    even = [str(number // 4) for number in range(40)]
    assert set(group_offsets(values, even).values()) == {0.0}
    assert variance_components(values, even).between == 0.0


def test_few_values_tell_nothing():
    assert variance_components([0.0, 0.1, 5.0, 5.1], ["a", "a", "b", "b"]) == Components(0.0, 0.0)
    assert others_offsets([0.0, 0.1, 5.0, 5.1], ["a", "a", "b", "b"]) == [0.0] * 4


def test_the_unknown_group_has_no_offset_and_no_say():
    offsets = group_offsets([*VALUES, 100.0], [*GROUPS, ""])
    assert offsets == group_offsets(VALUES, GROUPS)
    assert others_offsets([*VALUES, 100.0], [*GROUPS, ""])[-1] == 0.0


rows = st.lists(st.tuples(st.floats(-1, 1), st.sampled_from(["", "a", "b", "c", "d"])), min_size=1, max_size=80)


@settings(max_examples=200, deadline=None)
@given(rows)
def test_a_shrunken_mean_lies_between_its_own_and_everybodys(values_groups):
    values, groups = zip(*values_groups, strict=True)
    components = variance_components(values, groups)
    assert components.within >= 0
    assert components.between >= 0
    for group, offset in group_offsets(values, groups).items():
        own = [value for value, name in values_groups if name == group]
        mean = sum(own) / len(own)
        assert min(0.0, mean) - 1e-9 <= offset <= max(0.0, mean) + 1e-9


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, 79), st.floats(-1, 1))
def test_a_value_enters_its_own_baseline_by_the_spread_alone(values_groups, place, other):
    """Where credibility is held still, changing a value changes the baselines of others only."""
    values, groups = (list(column) for column in zip(*values_groups, strict=True))
    place %= len(values)
    before = variance_components(values, groups)
    offset = others_offsets(values, groups)[place]
    values[place] = other
    after = variance_components(values, groups)
    n = groups.count(groups[place]) - 1
    z_before, z_after = before.credibility(n), after.credibility(n)
    if groups[place] == "" or n == 0 or z_before == 0:
        return
    assert others_offsets(values, groups)[place] == pytest.approx(offset / z_before * z_after, abs=1e-9)


def test_shrinking_beats_both_extremes():
    """Groups of four with true means that differ a little: nearer to the truth than own means, and than none."""
    rng = random.Random(5)
    truth = {str(group): rng.gauss(0, 0.2) for group in range(60)}
    groups = [name for name in truth for _ in range(4)]
    values = [truth[name] + rng.gauss(0, 0.5) for name in groups]
    shrunken = group_offsets(values, groups)
    own = {name: sum(v for v, g in zip(values, groups, strict=True) if g == name) / 4 for name in truth}

    def error(estimate):
        return sum((estimate[name] - truth[name]) ** 2 for name in truth)

    assert error(shrunken) < 0.8 * error(own)
    assert error(shrunken) < 0.9 * error(dict.fromkeys(truth, 0.0))
