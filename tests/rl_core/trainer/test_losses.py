import math

import pytest
import torch

from rl_core.specs import LossKind, LossSpec
from rl_core.trainer.losses import LOSSES, token_loss

# Ratios 1, 3, 0.25, 1.2 against a behaviour logprob of −1, with advantages of both signs.
RATIOS = [1.0, 3.0, 0.25, 1.2]
ADVANTAGES = torch.tensor([1.0, 2.0, 1.0, -1.0])
BEHAVIOUR = torch.full((4,), -1.0)


def logprobs() -> torch.Tensor:
    return torch.tensor([-1.0 + math.log(r) for r in RATIOS], requires_grad=True)


def run(spec: LossSpec):
    x = logprobs()
    out = token_loss(x, BEHAVIOUR, ADVANTAGES, spec)
    out.loss.sum().backward()
    return out, x.grad


def test_every_kind_has_a_function():
    assert set(LOSSES) == set(LossKind)


def test_pg_tis_by_hand():
    out, grad = run(LossSpec(kind=LossKind.PG_TIS, tis_cap=2.0))
    weights = [1.0, 2.0, 0.25, 1.2]
    expected = [-w * a * (-1 + math.log(r)) for w, a, r in zip(weights, ADVANTAGES.tolist(), RATIOS, strict=True)]
    torch.testing.assert_close(out.loss.detach(), torch.tensor(expected))
    torch.testing.assert_close(grad, -torch.tensor(weights) * ADVANTAGES)
    assert out.capped.tolist() == [False, True, False, False]
    assert not out.masked.any()


def test_icepop_by_hand():
    out, grad = run(LossSpec(kind=LossKind.ICEPOP, ratio_low=0.5, ratio_high=2.0))
    torch.testing.assert_close(grad, torch.tensor([-1.0, 0.0, 0.0, 1.2]))
    assert out.masked.tolist() == [False, True, True, False]
    assert out.loss[1].item() == 0.0


def test_ppo_clip_by_hand():
    out, grad = run(LossSpec(kind=LossKind.PPO_CLIP, ratio_low=0.7, ratio_high=1.5))
    # A token whose probability has risen past the bound with a positive advantage is done; one that has fallen is not.
    torch.testing.assert_close(out.loss.detach(), torch.tensor([-1.0, -3.0, -0.25, 1.2]))
    torch.testing.assert_close(grad, torch.tensor([-1.0, 0.0, -0.25, 1.2]))
    assert out.masked.tolist() == [False, True, False, False]


def test_ppo_clip_bounds_a_negative_advantage_from_below():
    x = torch.tensor([-1.0 + math.log(0.25)], requires_grad=True)
    out = token_loss(
        x, BEHAVIOUR[:1], torch.tensor([-1.0]), LossSpec(kind=LossKind.PPO_CLIP, ratio_low=0.7, ratio_high=1.5)
    )
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(0.7)
    assert x.grad is not None
    assert x.grad.item() == 0.0


def test_ppo_clip_gradient_is_that_of_its_value():
    spec = LossSpec(kind=LossKind.PPO_CLIP, ratio_low=0.7, ratio_high=1.5)
    x = logprobs().detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: token_loss(v, BEHAVIOUR.double(), ADVANTAGES.double(), spec).loss, (x,))


@pytest.mark.parametrize("kind", list(LossKind))
def test_on_policy_all_losses_have_the_policy_gradient(kind):
    x = torch.tensor([-0.5, -2.0], requires_grad=True)
    token_loss(x, x.detach().clone(), torch.tensor([0.3, -0.7]), LossSpec(kind=kind)).loss.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([-0.3, 0.7]))


@pytest.mark.parametrize("kind", list(LossKind))
def test_zero_advantage_sends_no_gradient(kind):
    """The trainer runs such sequences forward only; a loss for which that is wrong must not enter the table."""
    x = logprobs()
    token_loss(x, BEHAVIOUR, torch.zeros(4), LossSpec(kind=kind)).loss.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
