import math

import pytest
import torch

from rl_core.errors import SpecError
from rl_core.specs import PREFERENCE_LOSSES, LossKind, LossSpec, PreferenceSpec
from rl_core.trainer.losses import LOSSES, PREFERENCES, dpo, kto, token_loss

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
    assert set(LOSSES) == set(LossKind) - PREFERENCE_LOSSES
    assert set(PREFERENCES) == PREFERENCE_LOSSES


@pytest.mark.parametrize("kind", sorted(PREFERENCE_LOSSES))
def test_a_preference_loss_is_no_policy_gradient(kind):
    with pytest.raises(SpecError, match="policy-gradient"):
        LossSpec(kind=kind)


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


@pytest.mark.parametrize("kind", list(LOSSES))
def test_on_policy_all_losses_have_the_policy_gradient(kind):
    x = torch.tensor([-0.5, -2.0], requires_grad=True)
    token_loss(x, x.detach().clone(), torch.tensor([0.3, -0.7]), LossSpec(kind=kind)).loss.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([-0.3, 0.7]))


@pytest.mark.parametrize("kind", list(LOSSES))
def test_zero_advantage_sends_no_gradient(kind):
    """The trainer runs such sequences forward only; a loss for which that is wrong must not enter the table."""
    x = logprobs()
    token_loss(x, BEHAVIOUR, torch.zeros(4), LossSpec(kind=kind)).loss.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand():
    spec = PreferenceSpec(beta=0.5, desirable_weight=1.0, undesirable_weight=2.0)
    ratios = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    z = torch.full((3,), 0.4, dtype=torch.float64)
    losses = kto(ratios, z, labels, spec)
    gains = [sigmoid(0.5 * 0.6), sigmoid(-0.5 * 0.6), sigmoid(0.5 * 2.4)]
    weights = [1.0, 2.0, 2.0]
    expected = [w * (1 - g) for w, g in zip(weights, gains, strict=True)]
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    losses.sum().backward()
    signs = [-1.0, 1.0, 1.0]  # a liked answer is to become likelier, the others less so
    slopes = [s * w * 0.5 * g * (1 - g) for s, w, g in zip(signs, weights, gains, strict=True)]
    torch.testing.assert_close(ratios.grad, torch.tensor(slopes, dtype=torch.float64))


def test_kto_sends_no_gradient_through_its_baseline():
    z = torch.tensor([0.3], requires_grad=True)
    kto(torch.tensor([1.0], requires_grad=True), z, torch.tensor([1.0]), PreferenceSpec()).sum().backward()
    assert z.grad is None


def test_dpo_by_hand():
    spec = PreferenceSpec(beta=0.5)
    chosen = torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    losses = dpo(chosen, rejected, torch.ones(3), spec)
    margins = [0.0, 1.5, -1.0]
    expected = [math.log(1 + math.exp(-margin)) for margin in margins]
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    losses.sum().backward()
    slopes = torch.tensor([-0.5 * sigmoid(-margin) for margin in margins], dtype=torch.float64)
    torch.testing.assert_close(chosen.grad, slopes)
    torch.testing.assert_close(rejected.grad, -slopes)


@pytest.mark.parametrize("kind", sorted(PREFERENCE_LOSSES))
def test_preference_gradients_are_those_of_their_values(kind):
    spec = PreferenceSpec(beta=0.7, undesirable_weight=1.5)
    ratios = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    against = torch.tensor([0.1, 0.4, -0.6], dtype=torch.float64)
    labels = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda r: PREFERENCES[kind](r, against, labels, spec), (ratios,))
