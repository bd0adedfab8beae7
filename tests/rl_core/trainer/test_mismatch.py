import math

import pytest
import torch

from rl_core.trainer.mismatch import k3_of_owners, measure_mismatch


def test_hand_computed():
    behaviour = torch.tensor([-1.0, -1.0])
    trained = behaviour + torch.tensor([math.log(2.0), math.log(0.5)])
    found = measure_mismatch(trained, behaviour)
    assert found.k1 == pytest.approx(0.0, abs=1e-7)
    assert found.k3 == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2, rel=1e-6)
    assert found.max_ratio == pytest.approx(2.0, rel=1e-6)
    assert found.ess == pytest.approx(2.5**2 / (2 * 4.25), rel=1e-6)


def test_each_owner_has_its_own():
    behaviour = torch.full((4,), -1.0)
    trained = behaviour + torch.tensor([math.log(2.0), 0.0, math.log(0.5), 0.0])
    found = k3_of_owners(trained, behaviour, torch.tensor([0, 2, 0, 2]))
    both = ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2
    assert found == {0: pytest.approx(both, rel=1e-6), 2: 0.0}


def test_no_mismatch():
    same = torch.tensor([-0.3, -4.0, -1.0])
    found = measure_mismatch(same, same)
    assert (found.k1, found.k3, found.max_ratio, found.ess) == (0.0, 0.0, 1.0, 1.0)


def test_estimators_meet_the_true_divergence():
    torch.manual_seed(0)
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.3, 0.3, 0.4])
    draws = torch.multinomial(p, 200_000, replacement=True)
    found = measure_mismatch(q.log()[draws], p.log()[draws])
    true = float((p * (p / q).log()).sum())
    assert found.k1 == pytest.approx(true, rel=0.1)
    assert found.k3 == pytest.approx(true, rel=0.05)
