"""From rollouts to training sequences: what is sampled untruncated is trained on, the rest is counted.

Every segment of a rollout shares its reward: after a compaction the summary's tokens and those that follow it are
one chain. Preferences (KTO, DPO) take rollouts however they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.errors import TrainerError, TrajectoryError
from rl_core.models.architecture import Architecture
from rl_core.models.packing import TrainSequence
from rl_core.types import Objective, Routes, TokenSegment, Trajectory

Turn = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class TrainRollout:
    """One attempt at a prompt (`group`) with its final reward.

    `advantage` None is left to the stage's kind; under KTO it is +1 for liked, −1 for disliked. `weight` is how much
    the rollout counts. `demonstration` is what should have been said, for DPO.
    """

    id: str
    group: str
    reward: float
    trajectory: Trajectory
    advantage: float | None = None
    weight: float = 1.0
    objective: Objective = Objective.POLICY_GRADIENT
    demonstration: str = ""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """What is trained on. `rollout_of` [B] maps sequences to rollouts; `behaviour` [B] holds their [T] logprobs.

    `chosen` are the sequences that end in a demonstration: nobody sampled them. `behaviour` is 0 outside the policy
    gradient.
    """

    rollouts: tuple[TrainRollout, ...]
    sequences: tuple[TrainSequence, ...]
    rollout_of: tuple[int, ...]
    behaviour: tuple[Tensor, ...]
    untrainable_tokens: int
    chosen: frozenset[int] = frozenset()

    def objective(self, sequence: int) -> Objective:
        """What a sequence is trained by."""
        return self.rollouts[self.rollout_of[sequence]].objective

    @property
    def gradient_rollouts(self) -> list[TrainRollout]:
        """The rollouts that the policy gradient takes."""
        return [rollout for rollout in self.rollouts if rollout.objective is Objective.POLICY_GRADIENT]

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that the policy gradient takes."""
        return sum(self._tokens())

    def longest_rollout_tokens(self) -> int:
        """Trained tokens of the longest rollout that the policy gradient takes; 1 without any."""
        return max(1, *self._tokens())

    def _tokens(self) -> list[int]:
        totals = [0] * len(self.rollouts)
        for index, sequence in enumerate(self.sequences):
            if self.objective(index) is Objective.POLICY_GRADIENT:
                totals[self.rollout_of[index]] += sum(sequence.loss_mask)
        return totals


class _Preparation:
    """Gathers sequences in the rollouts' order."""

    def __init__(self, arch: Architecture, *, replay: bool) -> None:
        self._arch, self._replay = arch, replay
        self.sequences: list[TrainSequence] = []
        self.rollout_of: list[int] = []
        self.behaviour: list[Tensor] = []
        self.chosen: set[int] = set()
        self.untrainable = 0

    def add_sampled(self, number: int, rollout: TrainRollout) -> None:
        """A rollout of the policy gradient: its untruncated segments."""
        for segment in rollout.trajectory.segments:
            sampled = sum(segment.loss_mask)
            if not segment.sampling.trainable:
                self.untrainable += sampled
            elif sampled:
                self._add(number, self._sequence(segment, rollout.id), torch.tensor(segment.logprobs))

    def add_preferred(self, number: int, rollout: TrainRollout, turn: Turn, *, max_tokens: int) -> None:
        """A rollout that was liked or not, or that a demonstration is preferred to."""
        if rollout.objective is Objective.KTO and rollout.advantage not in (1.0, -1.0):
            raise TrainerError(f"rollout {rollout.id} is for KTO and says neither liked (1) nor disliked (-1)")
        for segment in rollout.trajectory.segments:
            self._add(number, self._sequence(segment, rollout.id), torch.zeros(len(segment.token_ids)))
        if rollout.objective is Objective.DPO:
            if len(rollout.trajectory.segments) != 1 or not rollout.demonstration:
                raise TrainerError(f"rollout {rollout.id} is for DPO: it needs one segment and a demonstration")
            segment = rollout.trajectory.segments[0]
            prompt = segment.token_ids[: segment.loss_mask.index(1)]
            own = turn(rollout.demonstration)[:max_tokens]
            mask = [0] * len(prompt) + [1] * len(own)
            self.chosen.add(len(self.sequences))
            self._add(number, TrainSequence([*prompt, *own], mask, _temperature(segment)), torch.zeros(len(mask)))

    def _sequence(self, segment: TokenSegment, rollout: str) -> TrainSequence:
        if 1 not in segment.loss_mask:
            raise TrajectoryError(f"rollout {rollout} has no sampled tokens; leave it out")
        return _sequence(segment, self._arch, rollout, replay=self._replay)

    def _add(self, number: int, sequence: TrainSequence, behaviour: Tensor) -> None:
        self.sequences.append(sequence)
        self.rollout_of.append(number)
        self.behaviour.append(behaviour)


def no_turn(text: str) -> list[int]:
    """For batches without demonstrations. Raises: TrainerError."""
    raise TrainerError(f"no tokenizer is at hand for a demonstration of {len(text)} characters")


def prepare_batch(
    rollouts: Sequence[TrainRollout],
    arch: Architecture,
    *,
    replay: bool,
    turn: Turn = no_turn,
    max_demonstration_tokens: int = 1024,
) -> PreparedBatch:
    """Check and convert; recorded experts are taken along for `replay` only. `turn` makes tokens of demonstrations.

    Raises: TrajectoryError for a blob that does not fit the model, TrainerError when nothing in the batch can be
    trained on.
    """
    made = _Preparation(arch, replay=replay)
    for number, rollout in enumerate(rollouts):
        numbers = (rollout.reward, rollout.weight, 0.0 if rollout.advantage is None else rollout.advantage)
        if not np.isfinite(numbers).all() or rollout.weight < 0:
            raise TrainerError(
                f"rollout {rollout.id} has the reward {rollout.reward}, advantage {rollout.advantage}, weight "
                f"{rollout.weight}; score it again or leave it out"
            )
        if rollout.objective is Objective.POLICY_GRADIENT:
            made.add_sampled(number, rollout)
        else:
            made.add_preferred(number, rollout, turn, max_tokens=max_demonstration_tokens)
    if not made.sequences:
        raise TrainerError(
            "nothing in the batch was sampled from the whole distribution; check the sampling parameters"
        )
    return PreparedBatch(
        tuple(rollouts),
        tuple(made.sequences),
        tuple(made.rollout_of),
        tuple(made.behaviour),
        made.untrainable,
        frozenset(made.chosen),
    )


def _temperature(segment: TokenSegment) -> float:
    """That of the sampling; a greedy answer is scored at 1."""
    return segment.sampling.temperature or 1.0


def _sequence(segment: TokenSegment, arch: Architecture, rollout: str, *, replay: bool) -> TrainSequence:
    if min(segment.token_ids) < 0 or max(segment.token_ids) >= arch.vocab:
        raise TrajectoryError(f"rollout {rollout} has token ids outside the model's vocabulary of {arch.vocab}")
    routes = None
    if replay and segment.routes is not None and arch.experts:
        routes = decode_routes(segment.routes, arch)
    return TrainSequence(segment.token_ids, segment.loss_mask, _temperature(segment), routes)


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
