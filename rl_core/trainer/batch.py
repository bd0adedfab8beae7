"""From rollouts to training sequences: what is sampled untruncated is trained on, the rest is counted.

Every segment of a rollout shares its reward: after a compaction the summary's tokens and those that follow it are
one chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.errors import TrainerError, TrajectoryError
from rl_core.models.architecture import Architecture
from rl_core.models.packing import TrainSequence
from rl_core.types import Routes, TokenSegment, Trajectory


@dataclass(frozen=True, slots=True)
class TrainRollout:
    """One attempt at a prompt (`group`) with its final reward."""

    id: str
    group: str
    reward: float
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """What is trained on. `rollout_of` [B] maps sequences to rollouts; `behaviour` [B] holds their [T] logprobs."""

    rollouts: tuple[TrainRollout, ...]
    sequences: tuple[TrainSequence, ...]
    rollout_of: tuple[int, ...]
    behaviour: tuple[Tensor, ...]
    untrainable_tokens: int

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that are trained on."""
        return sum(sum(sequence.loss_mask) for sequence in self.sequences)

    def longest_rollout_tokens(self) -> int:
        """Trained tokens of the longest rollout."""
        totals = [0] * len(self.rollouts)
        for number, sequence in zip(self.rollout_of, self.sequences, strict=True):
            totals[number] += sum(sequence.loss_mask)
        return max(totals)


def prepare_batch(rollouts: Sequence[TrainRollout], arch: Architecture, *, replay: bool) -> PreparedBatch:
    """Check and convert; recorded experts are taken along for `replay` only.

    Raises: TrajectoryError for a blob that does not fit the model, TrainerError when nothing in the batch can be
    trained on.
    """
    sequences: list[TrainSequence] = []
    rollout_of: list[int] = []
    behaviour: list[Tensor] = []
    untrainable = 0
    for number, rollout in enumerate(rollouts):
        if not np.isfinite(rollout.reward):
            raise TrainerError(f"rollout {rollout.id} has the reward {rollout.reward}; score it again or leave it out")
        for segment in rollout.trajectory.segments:
            sampled = sum(segment.loss_mask)
            if not segment.sampling.trainable:
                untrainable += sampled
            elif sampled:
                sequences.append(_sequence(segment, arch, rollout.id, replay=replay))
                rollout_of.append(number)
                behaviour.append(torch.tensor(segment.logprobs))
    if not sequences:
        raise TrainerError(
            "nothing in the batch was sampled from the whole distribution; check the sampling parameters"
        )
    return PreparedBatch(tuple(rollouts), tuple(sequences), tuple(rollout_of), tuple(behaviour), untrainable)


def _sequence(segment: TokenSegment, arch: Architecture, rollout: str, *, replay: bool) -> TrainSequence:
    if min(segment.token_ids) < 0 or max(segment.token_ids) >= arch.vocab:
        raise TrajectoryError(f"rollout {rollout} has token ids outside the model's vocabulary of {arch.vocab}")
    routes = None
    if replay and segment.routes is not None and arch.experts:
        routes = decode_routes(segment.routes, arch)
    return TrainSequence(segment.token_ids, segment.loss_mask, segment.sampling.temperature, routes)


def decode_routes(routes: Routes, arch: Architecture) -> Tensor:
    """Recorded experts as int64 [T, L, K]. Raises: TrajectoryError when they are not this model's."""
    if (routes.layers, routes.top_k) != (arch.layers, arch.top_k):
        raise TrajectoryError(
            f"routes of {routes.layers} layers × top-{routes.top_k} do not fit a model of {arch.layers} × {arch.top_k}"
        )
    dtypes: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}
    dtype = dtypes.get(routes.dtype)
    shape = (routes.tokens, routes.layers, routes.top_k)
    if dtype is None or len(routes.data) != int(np.prod(shape)) * dtype.itemsize:
        raise TrajectoryError(f"routes of {routes.dtype} {shape} do not have {len(routes.data)} bytes")
    experts = torch.from_numpy(np.frombuffer(routes.data, dtype).astype(np.int64)).view(shape)
    if experts.numel() and int(experts.max()) >= arch.experts:
        raise TrajectoryError(f"routes name expert {int(experts.max())} of a model with {arch.experts}")
    return experts
