"""Policy-gradient losses per token. Pure functions, one for each `LossKind`; sums over tokens are normalised elsewhere.

ρ = exp(logprob − behaviour logprob) is the ratio of the trained policy to the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.specs import LossKind, LossSpec


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
