"""KTO and DPO inside a window's step: from sequences' log-ratios to what each of their tokens' logprobs is pushed by.

Both losses depend on a sequence only through r = Σ log π(token) − Σ log π_ref(token). Their gradient is therefore that
of Σ c·log π(token) with c = ∂loss/∂r at the policy as it is: pairs need not share a pack, and the reference needs no
second model. The reference is the policy before the window's first update: the version that answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.models.packing import TrainSequence
from rl_core.specs import LossKind, PreferenceSpec
from rl_core.trainer.batch import PreparedBatch
from rl_core.trainer.losses import PREFERENCES
from rl_core.types import Objective

Score = Callable[[Sequence[TrainSequence]], Tensor]


@dataclass(frozen=True, slots=True)
class Push:
    """What preferences ask of one minibatch. `coefficients` [B] are per sequence of the batch, 0 for others.

    `loss` is per attempt of the minibatch; `liked` and `disliked` are the log-ratios seen.
    """

    coefficients: Tensor
    loss: float
    liked: list[float]
    disliked: list[float]


def preference_margin(pushes: Sequence[Push]) -> float | None:
    """Mean log-ratio of what was liked or chosen above that of what was not, as last seen; None without both."""
    liked = [value for push in pushes[-1:] for value in push.liked]
    disliked = [value for push in pushes[-1:] for value in push.disliked]
    if not liked or not disliked:
        return None
    return sum(liked) / len(liked) - sum(disliked) / len(disliked)


class Preferences:
    """The KTO and DPO rollouts of a batch, dealt out into minibatches. Made before the window's first update."""

    def __init__(
        self, batch: PreparedBatch, minibatches: Sequence[Sequence[int]], spec: PreferenceSpec, score: Score
    ) -> None:
        """`score` gives the summed logprob of each sequence under the policy as it is. Shapes: [N] sequences → [N]."""
        self._batch, self._spec, self._score = batch, spec, score
        self._members = [
            [index for index in members if batch.objective(index) is not Objective.POLICY_GRADIENT]
            for members in minibatches
        ]
        # Before the first update nothing has moved: all log-ratios and the KL are 0, whatever the sequences.
        later = [index for members in self._members[1:] for index in members]
        self._shuffled = [mismatched(batch, members) for members in self._members]
        self._anchor = dict(zip(later, self._sums([batch.sequences[index] for index in later]), strict=True))
        flat = [sequence for sequences in self._shuffled[1:] for sequence in sequences]
        self._shuffled_anchor = self._sums(flat)

    def push(self, number: int) -> Push:
        """What minibatch `number` asks for, under the policy as it is."""
        batch, members = self._batch, self._members[number]
        values = [0.0] * len(members)
        if number and members:
            now = self._sums([batch.sequences[index] for index in members])
            values = [new - self._anchor[index] for new, index in zip(now, members, strict=True)]
        ratios = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        place = {index: position for position, index in enumerate(members)}
        kto = [index for index in members if batch.objective(index) is Objective.KTO]
        chosen = [index for index in members if index in batch.chosen]
        rejected = [index - 1 for index in chosen]  # a pair's sequences stand side by side
        loss = self._kto(ratios, [place[index] for index in kto], kto, self._divergence(number))
        loss = loss + self._dpo(ratios, [place[index] for index in chosen], [place[index] for index in rejected])
        coefficients = torch.zeros(len(batch.sequences))
        if members:
            (gradient,) = torch.autograd.grad(loss, ratios)
            coefficients[torch.tensor(members)] = gradient.float()
        liked = [index for index in kto if self._label(index) > 0] + chosen
        disliked = [index for index in kto if self._label(index) < 0] + rejected
        return Push(
            coefficients,
            loss.item(),
            [values[place[index]] for index in liked],
            [values[place[index]] for index in disliked],
        )

    def _kto(self, ratios: Tensor, places: list[int], sequences: list[int], divergence: float) -> Tensor:
        labels = torch.tensor([self._label(index) for index in sequences], dtype=ratios.dtype)
        against = torch.full((len(places),), divergence, dtype=ratios.dtype)
        losses = PREFERENCES[LossKind.KTO](ratios[places], against, labels, self._spec)
        return self._spec.kto_weight * losses.sum()

    def _dpo(self, ratios: Tensor, chosen: list[int], rejected: list[int]) -> Tensor:
        labels = torch.ones(len(chosen), dtype=ratios.dtype)
        losses = PREFERENCES[LossKind.DPO](ratios[chosen], ratios[rejected], labels, self._spec)
        return self._spec.dpo_weight * losses.sum()

    def _label(self, sequence: int) -> float:
        return self._batch.rollouts[self._batch.rollout_of[sequence]].advantage or 0.0

    def _divergence(self, number: int) -> float:
        """KL of the policy to the reference, from prompts with each other's answers: see `mismatched`."""
        sequences = self._shuffled[number]
        if not number or not sequences:
            return 0.0
        start = sum(len(earlier) for earlier in self._shuffled[1:number])
        before = self._shuffled_anchor[start : start + len(sequences)]
        now = self._sums(sequences)
        return max(0.0, sum(new - old for new, old in zip(now, before, strict=True)) / len(sequences))

    def _sums(self, sequences: Sequence[TrainSequence]) -> list[float]:
        sums: list[float] = self._score(sequences).tolist() if sequences else []
        return sums


def mismatched(batch: PreparedBatch, members: Sequence[int]) -> list[TrainSequence]:
    """Each KTO prompt with the next one's answer, none for fewer than two.

    Source: KTO's estimate of its KL (Ethayarajh et al. 2024, §4.2): the mean log-ratio of such pairs, cut at 0.
    """
    kto = [batch.sequences[index] for index in members if batch.objective(index) is Objective.KTO]
    if len(kto) < 2:
        return []
    pairs = []
    for own, other in zip(kto, [*kto[1:], kto[0]], strict=True):
        prompt = list(own.token_ids[: list(own.loss_mask).index(1)])
        start = list(other.loss_mask).index(1)
        answer, mask = list(other.token_ids[start:]), list(other.loss_mask[start:])
        pairs.append(TrainSequence(prompt + answer, [0] * len(prompt) + mask, own.temperature))
    return pairs
