"""One step in numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.trainer.batch import PreparedBatch
from rl_core.trainer.gradient import TokenRecords
from rl_core.trainer.messages import StepMetrics
from rl_core.trainer.mismatch import k3_of_owners, measure_mismatch
from rl_core.trainer.preference import Push, preference_margin


def step_metrics(
    batch: PreparedBatch,
    advantages: Tensor,
    records: TokenRecords,
    norms: list[float],
    pushes: list[Push],
    *,
    step: int,
    clip_norm: float,
    top_k: int,
    seconds: float,
    cpu_seconds: float,
) -> StepMetrics:
    """What a step says of itself, from what its minibatches left."""
    logprobs, behaviour = torch.cat(records.logprobs), torch.cat(records.behaviour)
    routing, tokens = records.routing, len(logprobs)
    mismatch = measure_mismatch(logprobs, behaviour) if tokens else None
    by_rollout = k3_of_owners(logprobs, behaviour, torch.cat(records.rollouts)) if tokens else {}
    trained = batch.gradient_rollouts
    rewards = torch.tensor([rollout.reward for rollout in trained or batch.rollouts], dtype=torch.float64)
    preferred = len(batch.rollouts) - len(trained)
    by_group: dict[str, list[float]] = {}
    for rollout in trained:
        by_group.setdefault(rollout.group, []).append(rollout.reward)
    flat = sum(len(set(r)) == 1 for r in by_group.values())
    return StepMetrics(
        step=step,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        # Of rollouts: one of several segments counts once.
        advantage_abs_mean=_mean(torch.stack([*dict(zip(batch.rollout_of, advantages.abs(), strict=True)).values()])),
        loss=records.loss / len(norms),
        grad_norm=max(norms),
        clipped=max(norms) > clip_norm,
        entropy=float(torch.cat(records.entropies).mean()) if tokens else None,
        k1_behaviour=mismatch.k1 if mismatch else None,
        k3_behaviour=mismatch.k3 if mismatch else None,
        k3_rollouts={batch.rollouts[number].id: k3 for number, k3 in by_rollout.items()},
        max_ratio=mismatch.max_ratio if mismatch else None,
        ess=mismatch.ess if mismatch else None,
        share_masked=records.masked / tokens if tokens else None,
        share_capped=records.capped / tokens if tokens else None,
        kl_reference_k1=_mean(logprobs - torch.cat(records.reference)) if records.reference and tokens else None,
        routing_disagreement=routing.disagreeing / routing.rows if routing.rows else None,
        share_routes_dropped=routing.dropped / (routing.rows * top_k) if routing.rows else None,
        groups=len(by_group),
        rollouts=len(batch.rollouts),
        share_groups_without_variance=flat / max(1, len(by_group)),
        trained_tokens=tokens,
        untrainable_tokens=batch.untrainable_tokens,
        computed_tokens=records.computed_tokens,
        sequence_tokens=sum(len(sequence.token_ids) for sequence in batch.sequences),
        optimizer_steps=len(norms),
        preference_rollouts=preferred,
        preference_tokens=records.preference_tokens,
        preference_loss=sum(push.loss for push in pushes) / preferred if preferred else None,
        preference_margin=preference_margin(pushes),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def _mean(values: Tensor) -> float:
    return float(values.mean())
