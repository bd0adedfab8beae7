"""Assignment to arms: a pure function, uniform, monotone in the share, independent between releases."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from controlplane.services.assignments import Assignment, Experiment, arm_assign, bucket_of
from controlplane.states import Arm

RELEASE = uuid.uuid4()
HASHES = [f"{number:064x}" for number in range(20_000)]


def experiment(share, salt="pepper"):
    return Experiment(RELEASE, salt, share, 3)


def test_nobody_without_a_key_or_an_experiment_is_assigned():
    assert arm_assign(None, user_hash="a") == Assignment(Arm.PROMOTED, None, None)
    assert arm_assign(experiment(1.0), user_hash="") == Assignment(Arm.PROMOTED, None, None)


def test_both_arms_of_an_experiment_carry_it():
    assert arm_assign(experiment(1.0), user_hash="a") == Assignment(Arm.CANARY, RELEASE, 3)
    assert arm_assign(experiment(0.0), user_hash="a") == Assignment(Arm.PROMOTED, RELEASE, 3)


@given(st.text(min_size=1, max_size=64), st.text(max_size=64), st.floats(0, 1), st.floats(0, 1))
def test_a_rising_share_takes_nobody_back(user, salt, one, other):
    low, high = sorted((one, other))
    if arm_assign(experiment(low, salt), user_hash=user).arm == Arm.CANARY:
        assert arm_assign(experiment(high, salt), user_hash=user).arm == Arm.CANARY


def test_shares_are_what_they_say():
    buckets = [bucket_of("pepper", user) for user in HASHES]
    assert min(buckets) >= 0
    assert max(buckets) < 1
    for share in (0.01, 0.05, 0.25, 0.5):
        seen = sum(bucket < share for bucket in buckets) / len(buckets)
        assert abs(seen - share) < 4 * (share * (1 - share) / len(buckets)) ** 0.5


def test_releases_are_independent():
    """Who was in one canary is no likelier to be in the next."""
    first = {user for user in HASHES if bucket_of("one", user) < 0.1}
    both = {user for user in first if bucket_of("two", user) < 0.1}
    assert abs(len(both) / len(first) - 0.1) < 0.03


def test_assignments_do_not_change_between_builds():
    assert bucket_of("pepper", HASHES[1]) == 0.027438289686192885
