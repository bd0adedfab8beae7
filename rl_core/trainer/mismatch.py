"""How far the trained policy is from the one that sampled, token by token: what makes an update off-policy.

With r = exp(logprob − behaviour): k1 = −log r and k3 = r − 1 − log r estimate KL(behaviour ‖ trained) from the
samples; k1 is unbiased and may be negative, k3 is also unbiased and never negative.
Source: Schulman 2020, "Approximating KL Divergence". ESS is Kish's effective sample size over the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Means over tokens; `ess` in (0, 1]."""

    k1: float
    k3: float
    max_ratio: float
    ess: float


def measure_mismatch(logprobs: Tensor, behaviour: Tensor) -> Mismatch:
    """Compare logprobs of the sampled tokens. Shapes: [M] each, M ≥ 1."""
    log_ratio = _log_ratio(logprobs, behaviour)
    ratio, k3 = log_ratio.exp(), _k3(log_ratio)
    ess = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    return Mismatch(k1=float(-log_ratio.mean()), k3=float(k3.mean()), max_ratio=float(ratio.max()), ess=float(ess))


def k3_of_owners(logprobs: Tensor, behaviour: Tensor, owners: Tensor) -> dict[int, float]:
    """Mean k3 over the tokens of each owner that has any. Shapes: [M] each; `owners` are whole numbers from 0."""
    k3 = _k3(_log_ratio(logprobs, behaviour))
    counts = torch.bincount(owners)
    sums = torch.zeros(len(counts), dtype=k3.dtype).index_add(0, owners, k3)
    return {int(owner): float(sums[owner] / counts[owner]) for owner in counts.nonzero().flatten()}


def _log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    return logprobs.detach().double() - behaviour.double()


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio
