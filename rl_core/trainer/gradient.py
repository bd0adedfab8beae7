"""The gradient of one minibatch: packs in shuffled order, one at a time, each forward, loss and backward.

Sequences that nothing pushes (an advantage of exactly 0, no preference) send no gradient under any loss: they run
forward only, for the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_core.models.moe import RoutingCounts
from rl_core.models.packing import Pack, TrainSequence, build_packs
from rl_core.models.transformer import Replay, Transformer
from rl_core.specs import LossSpec
from rl_core.trainer.batch import PreparedBatch
from rl_core.trainer.losses import token_loss
from rl_core.types import Objective

Progress = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class TokenRecords:
    """What was seen of the policy gradient's tokens, over all packs. Tensors are [m] each, one a pack.

    `rollouts` says whose each token is, as an index into the batch's.
    """

    loss: float = 0.0
    logprobs: list[Tensor] = field(default_factory=list)
    behaviour: list[Tensor] = field(default_factory=list)
    rollouts: list[Tensor] = field(default_factory=list)
    reference: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    masked: int = 0
    capped: int = 0
    preference_tokens: int = 0
    computed_tokens: int = 0
    routing: RoutingCounts = field(default_factory=RoutingCounts)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Sequences (indices into the batch) with what each token is weighed by.

    `advantages` [B] is per sequence of the batch, weights included; `reference` [B] of [T] logprobs, or None;
    `normaliser` divides the summed token loss. `pushes` [B] is what preferences multiply the logprobs of a sequence
    by; those sequences have no advantage.
    """

    batch: PreparedBatch
    members: tuple[int, ...]
    advantages: Tensor
    reference: tuple[Tensor, ...] | None
    normaliser: float
    pushes: Tensor


@dataclass(frozen=True, slots=True)
class GradientSettings:
    """How gradients are made."""

    loss: LossSpec
    token_budget: int

    @property
    def replay(self) -> Replay:
        """How recorded experts are used."""
        return Replay(self.loss.router_replay, self.loss.replay_plausibility)


def accumulate_gradient(
    model: Transformer,
    minibatch: Minibatch,
    records: TokenRecords,
    *,
    settings: GradientSettings,
    generator: torch.Generator,
    progress: Progress,
) -> None:
    """Add the minibatch's gradient to the model's buffers, and what was seen to `records`.

    The packs' order is drawn from `generator`: summing fp32 gradients in one fixed order would favour the first.
    """
    work = [(pack, members, True) for pack, members in _packs(minibatch, settings, silent=False)]
    work += [(pack, members, False) for pack, members in _packs(minibatch, settings, silent=True)]
    order = torch.randperm(len(work), generator=generator).tolist()
    for done, index in enumerate(order):
        pack, members, train = work[index]
        progress({"phase": "packs", "done": done, "total": len(work)})
        _run(model, minibatch, pack, members, records, settings=settings, train=train)


def _packs(minibatch: Minibatch, settings: GradientSettings, *, silent: bool) -> list[tuple[Pack, list[int]]]:
    still = (minibatch.advantages == 0.0) & (minibatch.pushes == 0.0)
    members = [m for m in minibatch.members if bool(still[m]) == silent]
    sequences: list[TrainSequence] = [minibatch.batch.sequences[m] for m in members]
    if not sequences:
        return []
    return [(pack, members) for pack in build_packs(sequences, token_budget=settings.token_budget)]


def gather_tokens(pack: Pack, members: list[int], tables: tuple[Tensor, ...]) -> Tensor:
    """The pack's targets' entries of per-sequence tables. Shapes: tables [B] of [T] → [M]."""
    pairs = zip(pack.owner.tolist(), pack.index.tolist(), strict=True)
    return torch.stack([tables[members[owner]][index] for owner, index in pairs])


def _run(
    model: Transformer,
    minibatch: Minibatch,
    pack: Pack,
    members: list[int],
    records: TokenRecords,
    *,
    settings: GradientSettings,
    train: bool,
) -> None:
    out = model.forward(pack, replay=settings.replay, train=train)
    behaviour = gather_tokens(pack, members, minibatch.batch.behaviour)
    owners = torch.tensor(members)[pack.owner]
    tokens = token_loss(out.logprobs, behaviour, minibatch.advantages[owners], settings.loss)
    loss = tokens.loss.sum() * (settings.loss.scale / minibatch.normaliser)
    if train:
        (loss + (minibatch.pushes[owners] * out.logprobs).sum()).backward()  # type: ignore[no-untyped-call]
    sampled = torch.tensor([minibatch.batch.objective(m) is Objective.POLICY_GRADIENT for m in members])[pack.owner]
    records.loss += loss.item()
    records.logprobs.append(out.logprobs.detach()[sampled])
    records.behaviour.append(behaviour[sampled])
    records.rollouts.append(torch.tensor(minibatch.batch.rollout_of)[owners][sampled])
    records.entropies.append(out.entropies[sampled])
    if minibatch.reference is not None:
        records.reference.append(gather_tokens(pack, members, minibatch.reference)[sampled])
    records.masked += int(tokens.masked[sampled].sum())
    records.capped += int(tokens.capped[sampled].sum())
    records.preference_tokens += int((~sampled).sum())
    records.computed_tokens += len(pack.tokens)
    records.routing.add(out.routing)


def score_sequences(
    model: Transformer, sequences: Sequence[TrainSequence], *, settings: GradientSettings, progress: Progress
) -> tuple[Tensor, ...]:
    """Logprobs of the sequences' targets under `model`, forward only. Shapes: [B] of [T], 0 where not trained on."""
    tables = tuple(torch.zeros(len(sequence.token_ids)) for sequence in sequences)
    packs = build_packs(sequences, token_budget=settings.token_budget)
    for done, pack in enumerate(packs):
        progress({"phase": "reference", "done": done, "total": len(packs)})
        logprobs = model.forward(pack, replay=settings.replay, train=False).logprobs.tolist()
        for owner, index, logprob in zip(pack.owner.tolist(), pack.index.tolist(), logprobs, strict=True):
            tables[owner][index] = logprob
    return tables
