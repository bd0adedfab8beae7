"""Losses: pure functions, one for each `LossKind`; sums are normalised elsewhere.

Policy-gradient losses are per token: ρ = exp(logprob − behaviour logprob) is the ratio of the trained policy to the one
that sampled. Preference losses are per sequence: r = log π(y|x) − log π_ref(y|x), summed over the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.specs import LossKind, LossSpec, PreferenceSpec


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Shapes: [M]. `masked` tokens send no gradient, `capped` ones a bounded one."""

    loss: Tensor
    masked: Tensor
    capped: Tensor


Loss = Callable[[Tensor, Tensor, Tensor, LossSpec], TokenLoss]


def token_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, spec: LossSpec) -> TokenLoss:
    """The spec's loss of each token. Shapes: logprobs (differentiable), behaviour, advantages [M]."""
    return LOSSES[spec.kind](logprobs, behaviour, advantages, spec)


def pg_tis(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, spec: LossSpec) -> TokenLoss:
    """−min(ρ, C)·A·logprob, the weight detached: policy gradient with truncated importance sampling.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; Espeholt et
    al. 2018, IMPALA (arXiv:1802.01561), eq. 1 for the truncation. C is `tis_cap`.
    """
    ratio = torch.exp(logprobs.detach() - behaviour)
    loss = -ratio.clamp(max=spec.tis_cap) * advantages * logprobs
    return TokenLoss(loss, torch.zeros_like(ratio, dtype=torch.bool), ratio > spec.tis_cap)


def icepop(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, spec: LossSpec) -> TokenLoss:
    """−ρ·A·logprob where ρ lies in [ratio_low, ratio_high], 0 elsewhere; the weight detached.

    Source: Ling team 2025, "Every Step Evolves" (arXiv:2510.18855), IcePop: double-sided masking of the discrepancy
    between training and inference.
    """
    ratio = torch.exp(logprobs.detach() - behaviour)
    masked = (ratio < spec.ratio_low) | (ratio > spec.ratio_high)
    loss = -ratio.masked_fill(masked, 0.0) * advantages * logprobs
    return TokenLoss(loss, masked, torch.zeros_like(masked))


def ppo_clip(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, spec: LossSpec) -> TokenLoss:
    """−min(ρ·A, clip(ρ, ratio_low, ratio_high)·A): no gradient to a token pushed past its bound.

    Source: Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 7; separate bounds as in Yu et al. 2025, DAPO
    (arXiv:2503.14476). Ours has the sampling policy as the old one.
    """
    ratio = torch.exp(logprobs - behaviour)
    free = ratio * advantages
    bound = ratio.clamp(spec.ratio_low, spec.ratio_high) * advantages
    return TokenLoss(-torch.minimum(free, bound), (bound < free).detach(), torch.zeros_like(free, dtype=torch.bool))


LOSSES: dict[LossKind, Loss] = {LossKind.PG_TIS: pg_tis, LossKind.ICEPOP: icepop, LossKind.PPO_CLIP: ppo_clip}

PreferenceLoss = Callable[[Tensor, Tensor, Tensor, PreferenceSpec], Tensor]


def kto(ratios: Tensor, against: Tensor, labels: Tensor, spec: PreferenceSpec) -> Tensor:
    """λ (1 − σ(±β (r − z))) of each answer: + and λ_D where it was liked (label > 0), − and λ_U where it was not.

    Source: Ethayarajh et al. 2024, KTO (arXiv:2402.01306), eq. 7 and 8. z, the same for all and without a gradient, is
    the KL of the trained policy to the reference: `against`. Shapes: [N] each.
    """
    liked = labels > 0
    gain = torch.sigmoid(spec.beta * torch.where(liked, ratios - against.detach(), against.detach() - ratios))
    weight = torch.where(liked, spec.desirable_weight, spec.undesirable_weight)
    return weight * (1 - gain)


def dpo(ratios: Tensor, against: Tensor, labels: Tensor, spec: PreferenceSpec) -> Tensor:
    """−log σ(β (r_chosen − r_rejected)) of each pair; `ratios` are of the chosen, `against` of the rejected.

    Source: Rafailov et al. 2023, DPO (arXiv:2305.18290), eq. 7. Shapes: [N] each.
    """
    del labels
    return -torch.nn.functional.logsigmoid(spec.beta * (ratios - against))


PREFERENCES: dict[LossKind, PreferenceLoss] = {LossKind.KTO: kto, LossKind.DPO: dpo}
