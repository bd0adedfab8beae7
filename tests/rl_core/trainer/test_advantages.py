import pytest
import torch

from rl_core.specs import AdvantageKind
from rl_core.trainer.advantages import ADVANTAGES, compute_advantages

REWARDS = [1.0, 0.0, 0.5, 0.5, 2.0, 2.0, 7.0]
GROUPS = ["a", "a", "b", "a", "c", "c", "d"]


def test_every_kind_has_a_function():
    assert set(ADVANTAGES) == set(AdvantageKind)


# Group a is 1, 0, 0.5 (mean 0.5, population deviation sqrt(1/6)), b and d have one member, c has no variance.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (AdvantageKind.DR_GRPO, [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (AdvantageKind.GRPO, [0.5 * 6**0.5, -0.5 * 6**0.5, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (AdvantageKind.RLOO, [1 - 0.25, 0 - 0.75, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (AdvantageKind.RESPONDERS, [r - 13 / 7 for r in REWARDS]),
        (AdvantageKind.STRATA, [r - 13 / 7 for r in REWARDS]),  # too few to tell strata apart: all fall back
    ],
)
def test_hand_computed(kind, expected):
    torch.testing.assert_close(compute_advantages(kind, REWARDS, GROUPS), torch.tensor(expected))


def test_equal_rewards_give_exactly_zero():
    for kind in (AdvantageKind.DR_GRPO, AdvantageKind.GRPO, AdvantageKind.RLOO):
        assert torch.equal(compute_advantages(kind, [0.1] * 8, ["a"] * 8), torch.zeros(8))


def test_strata_by_their_groups():
    """Twelve strata of two that agree within and differ between: each attempt is compared with its twin alone."""
    rewards = [1.0, 1.0] * 6 + [0.0, 0.0] * 6
    groups = [str(number // 2) for number in range(24)]
    torch.testing.assert_close(compute_advantages(AdvantageKind.STRATA, rewards, groups), torch.zeros(24))
