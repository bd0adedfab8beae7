"""Advantages: what an attempt's reward is worth against a baseline. Pure functions, one for each `AdvantageKind`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_core.specs import AdvantageKind
from rl_core.windows.advantages import Attempt, window_advantages

STD_FLOOR = 1e-6

Advantage = Callable[[Tensor, list[Tensor]], Tensor]


def compute_advantages(kind: AdvantageKind, rewards: Sequence[float], groups: Sequence[str]) -> Tensor:
    """Advantages of attempts with `rewards` in `groups` (attempts at one prompt). Shapes: [B] each, fp32."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    indices = [torch.tensor(member) for member in members.values()]
    exact = ADVANTAGES[kind](torch.tensor(rewards, dtype=torch.float64), indices)
    return exact.to(torch.float32)


def dr_grpo(rewards: Tensor, groups: list[Tensor]) -> Tensor:
    """Reward minus the group's mean. Source: Liu et al. 2025, "Understanding R1-Zero-Like Training"
    (arXiv:2503.20783), Dr. GRPO: GRPO without the division by the standard deviation.
    """
    out = torch.zeros_like(rewards)
    for group in groups:
        out[group] = rewards[group] - rewards[group].mean()
    return out


def grpo(rewards: Tensor, groups: list[Tensor]) -> Tensor:
    """Reward minus the group's mean over its standard deviation; 0 in groups without variance.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), §4.1.2. Ours takes the population's deviation.
    """
    out = torch.zeros_like(rewards)
    for group in groups:
        std = rewards[group].std(correction=0)
        if std > STD_FLOOR:
            out[group] = (rewards[group] - rewards[group].mean()) / std
    return out


def rloo(rewards: Tensor, groups: list[Tensor]) -> Tensor:
    """Reward minus the mean of the group's others; 0 for a group of one.

    Source: Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740), eq. 8.
    """
    out = torch.zeros_like(rewards)
    for group in groups:
        n = len(group)
        if n > 1:
            out[group] = (rewards[group] - rewards[group].mean()) * (n / (n - 1))
    return out


def responders(rewards: Tensor, groups: list[Tensor]) -> Tensor:
    """Reward minus the mean of all that answered: single attempts, the window is the group.

    Source: the batch baseline of Hu et al. 2025, REINFORCE++ (arXiv:2501.03262); ours does not divide by the
    deviation.
    """
    del groups
    return rewards - rewards.mean()


def strata(rewards: Tensor, groups: list[Tensor]) -> Tensor:
    """Reward minus the shrunken mean of the others of its group: single attempts, a group is a stratum of prompts.

    Source: see `rl_core.windows.advantages`, which also knows users and weights.
    """
    names = {index: str(number + 1) for number, group in enumerate(groups) for index in group.tolist()}
    attempts = [Attempt(reward, stratum=names[index]) for index, reward in enumerate(rewards.tolist())]
    return torch.tensor(window_advantages(AdvantageKind.STRATA, attempts), dtype=rewards.dtype)


ADVANTAGES: dict[AdvantageKind, Advantage] = {
    AdvantageKind.DR_GRPO: dr_grpo,
    AdvantageKind.GRPO: grpo,
    AdvantageKind.RLOO: rloo,
    AdvantageKind.RESPONDERS: responders,
    AdvantageKind.STRATA: strata,
}
