import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.specs import AdvantageKind
from rl_core.windows.advantages import Attempt, group_advantages, window_advantages

RESPONDERS, STRATA = AdvantageKind.RESPONDERS, AdvantageKind.STRATA


def test_responders_by_hand():
    attempts = [Attempt(1.0), Attempt(0.0), Attempt(0.0), Attempt(1.0, weight=2.0)]
    assert window_advantages(RESPONDERS, attempts) == pytest.approx([0.4, -0.6, -0.6, 0.4])
    assert window_advantages(RESPONDERS, []) == []


def test_strata_by_hand():
    """Six strata of two: three always rewarded, three never. Within 0, so that each is compared with its twin."""
    attempts = [Attempt(float(s < 3), stratum=str(s)) for s in range(6) for _ in range(2)]
    attempts += [Attempt(1.0, stratum=f"own-{number}") for number in range(5)]  # nothing to compare with but all
    attempts += [Attempt(0.0, stratum="7"), Attempt(1.0, stratum="7")] * 5  # gives the degrees of freedom
    advantages = window_advantages(STRATA, attempts, user_offset=False)
    mean = (6 + 5 + 5) / 27
    assert advantages[12] == pytest.approx(1 - mean)
    assert abs(advantages[0]) < abs(1 - mean)
    assert abs(advantages[6]) < abs(0 - mean)


def test_a_strict_user_is_compared_with_himself():
    """Two users of eight answers: one likes a quarter, the other three quarters, whatever the policy does."""
    rewards = {"strict": [1, 0, 0, 0] * 8, "kind": [1, 1, 1, 0] * 8}
    attempts = [Attempt(float(r), user=user) for user, values in rewards.items() for r in values]
    plain = window_advantages(STRATA, attempts, user_offset=False)
    offset = window_advantages(STRATA, attempts)
    assert plain == pytest.approx(window_advantages(RESPONDERS, attempts))
    strict_like, kind_dislike = offset[0], offset[32 + 3]
    assert strict_like > plain[0] == 0.5
    assert kind_dislike < plain[35] == -0.5


def test_strata_and_offsets_take_noise_out():
    """Half the variance of rewards comes from prompts and users: advantages keep the policy's part."""
    rng = random.Random(2)
    ease = {str(p): rng.gauss(0, 0.3) for p in range(40)}
    mood = {f"u{u}": rng.gauss(0, 0.3) for u in range(60)}
    attempts, policy = [], []
    for _ in range(400):
        prompt, user, own = rng.choice(list(ease)), rng.choice(list(mood)), rng.gauss(0, 0.3)
        policy.append(own)
        attempts.append(Attempt(0.5 + ease[prompt] + mood[user] + own, stratum=prompt, user=user))

    def noise(kind):
        advantages = window_advantages(kind, attempts)
        return statistics.pvariance([a - own for a, own in zip(advantages, policy, strict=True)])

    assert noise(STRATA) < 0.5 * noise(RESPONDERS)


attempts_of = st.lists(
    st.builds(
        Attempt,
        st.floats(-1, 1),
        st.floats(0.1, 4),
        st.sampled_from(["", "p", "q", "r"]),
        st.sampled_from(["", "u", "v"]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(attempts_of)
def test_weighted_advantages_of_responders_add_up_to_nothing(attempts):
    advantages = window_advantages(RESPONDERS, attempts)
    assert sum(a.weight * value for a, value in zip(attempts, advantages, strict=True)) == pytest.approx(0, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(attempts_of, st.floats(-1, 1))
def test_a_shift_of_all_rewards_changes_nothing(attempts, shift):
    moved = [Attempt(a.reward + shift, a.weight, a.stratum, a.user) for a in attempts]
    assert window_advantages(STRATA, moved) == pytest.approx(window_advantages(STRATA, attempts), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(attempts_of, st.randoms(use_true_random=False))
def test_the_order_of_attempts_does_not_matter(attempts, rng):
    order = list(range(len(attempts)))
    rng.shuffle(order)
    shuffled = window_advantages(STRATA, [attempts[place] for place in order])
    advantages = window_advantages(STRATA, attempts)
    assert shuffled == pytest.approx([advantages[place] for place in order], abs=1e-6)


def test_attempts_at_one_simulated_task():
    assert group_advantages([1.0, 0.0, 0.5]) == [0.5, -0.5, 0.0]
