"""One trainer: fp32 master weights, AdamW, and `step`, which turns scored rollouts into a new policy.

Deterministic: equal state and equal rollouts in equal order give equal weights, bit for bit, on one machine with one
number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.chat import ChatTokenizer
from rl_core.errors import RlCoreError, TrainerError, TrainerLost
from rl_core.models.architecture import read_architecture
from rl_core.models.checkpoint import read_checkpoint, write_checkpoint
from rl_core.models.packing import TrainSequence
from rl_core.models.parameters import ComputeDtype, Parameters, pick_compute_dtype
from rl_core.models.transformer import Transformer
from rl_core.specs import KlEstimator, LossSpec, OptimizerSpec, PreferenceSpec, RealtimeStage, Stage
from rl_core.trainer.advantages import compute_advantages
from rl_core.trainer.batch import PreparedBatch, TrainRollout, prepare_batch
from rl_core.trainer.gradient import (
    GradientSettings,
    Minibatch,
    Progress,
    TokenRecords,
    accumulate_gradient,
    score_sequences,
)
from rl_core.trainer.memory import cpu_seconds, release_freed
from rl_core.trainer.messages import StepMetrics
from rl_core.trainer.metrics import step_metrics
from rl_core.trainer.preference import Preferences, Push
from rl_core.types import Objective

TOKEN_BUDGET = 1280  # computed tokens a pack: about 0.7 MB of activations each for a 135 M model in fp32


def _silent(progress: dict[str, Any]) -> None:
    del progress


class Trainer:
    """A policy in training. `steps` counts the steps taken; `generator` holds everything random."""

    def __init__(
        self,
        model_dir: Path,
        *,
        stage: Stage,
        seed: int,
        dtype: ComputeDtype | None = None,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        """Load the run's first version from `model_dir`. Raises: ModelError."""
        self.model_dir = Path(model_dir)
        self.stage = stage
        self.steps = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.arch = read_architecture(self.model_dir)
        self.parameters = Parameters(
            self.arch, read_checkpoint(self.model_dir), dtype=dtype or pick_compute_dtype(), trainable=True
        )
        self.model = Transformer(self.parameters)
        self._settings = GradientSettings(self.loss_spec, token_budget)
        self._reference: Transformer | None = None
        self._base: Tensor | None = None
        self.optimizer = self._make_optimizer(self.stage.optimizer)
        release_freed()

    @property
    def loss_spec(self) -> LossSpec:
        """The stage's objective."""
        return self.stage.loss

    def _make_optimizer(self, spec: OptimizerSpec) -> torch.optim.AdamW:
        master = self.parameters.master
        master.grad = self.parameters.grad
        return torch.optim.AdamW(
            [master],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def reset_moments(self) -> None:
        """Forget the optimiser's moments: kept ones would hide a bad window behind the good ones before it."""
        self.optimizer.state.clear()

    def step(self, rollouts: Sequence[TrainRollout], *, progress: Progress = _silent) -> StepMetrics:
        """Take one step (a real-time stage: its `optimizer_steps`, moments reset) on scored rollouts.

        Raises: TrajectoryError, TrainerError, and then nothing of the state has changed; TrainerLost when a later
        minibatch of a window failed: go back to a checkpoint.
        """
        started, cpu_started = time.perf_counter(), cpu_seconds()
        batch = self._prepare(rollouts)
        drawn = self.generator.get_state()
        reference = self._score_reference(batch, progress)
        advantages = self._advantages(batch, reference)
        records = TokenRecords()
        norms: list[float] = []
        pushes: list[Push] = []
        try:
            minibatches = self._minibatches(batch)
            preferences = Preferences(batch, minibatches, self._preference_spec, partial(self._sums, progress=progress))
            for number, members in enumerate(minibatches):
                push = preferences.push(number)
                attempts = len({batch.rollout_of[s] for s in members})
                minibatch = Minibatch(
                    batch,
                    members,
                    advantages,
                    reference,
                    normaliser=attempts * self._most_tokens(batch),
                    pushes=push.coefficients / attempts,
                )
                norms.append(self._update(minibatch, records, progress, first=not norms))
                pushes.append(push)
        except RlCoreError as error:
            if norms:
                raise TrainerLost(f"the window's step broke off after {len(norms)} updates: {error}") from error
            self.generator.set_state(drawn)
            raise
        self.steps += 1
        release_freed()
        return step_metrics(
            batch,
            advantages,
            records,
            norms,
            pushes,
            step=self.steps,
            clip_norm=self.stage.optimizer.clip_norm,
            top_k=self.arch.top_k,
            seconds=time.perf_counter() - started,
            cpu_seconds=cpu_seconds() - cpu_started,
        )

    def _update(self, minibatch: Minibatch, records: TokenRecords, progress: Progress, *, first: bool) -> float:
        """One optimiser step; the gradient's norm before clipping. Raises: TrainerError when it is not finite."""
        grad = self.parameters.grad
        if grad is None:
            raise TrainerError("these parameters are a reference and cannot be trained")
        grad.zero_()
        accumulate_gradient(
            self.model, minibatch, records, settings=self._settings, generator=self.generator, progress=progress
        )
        norm = float(grad.norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise TrainerError("the gradient is not finite; look for damaged logprobs or rewards in the batch")
        clip = self.stage.optimizer.clip_norm
        if norm > clip:
            grad.mul_(clip / norm)
        progress({"phase": "optimizer"})
        if first:
            if self._base is None:
                self._base = self.parameters.current()
            if isinstance(self.stage, RealtimeStage):
                self.reset_moments()
        self.optimizer.step()
        self.parameters.refresh()
        return norm

    def _minibatches(self, batch: PreparedBatch) -> list[tuple[int, ...]]:
        """Sequences by optimiser step: all at once, or a real-time window's rollouts dealt out at random."""
        everything = tuple(range(len(batch.sequences)))
        if not isinstance(self.stage, RealtimeStage) or self.stage.optimizer_steps == 1:
            return [everything]
        steps = min(self.stage.optimizer_steps, len(set(batch.rollout_of)))
        dealt = torch.randperm(len(batch.rollouts), generator=self.generator).tolist()
        hand = {rollout: place % steps for place, rollout in enumerate(r for r in dealt if r in set(batch.rollout_of))}
        return [tuple(s for s in everything if hand[batch.rollout_of[s]] == step) for step in range(steps)]

    def _most_tokens(self, batch: PreparedBatch) -> float:
        """Dr. GRPO's constant: the most tokens that one attempt may have."""
        if isinstance(self.stage, RealtimeStage):
            return float(batch.longest_rollout_tokens())
        return float(self.stage.most_sampled_tokens)

    def _prepare(self, rollouts: Sequence[TrainRollout]) -> PreparedBatch:
        return prepare_batch(
            rollouts,
            self.arch,
            replay=self.loss_spec.router_replay,
            turn=lambda text: self._tokenizer.turn(text),
            max_demonstration_tokens=self._preference_spec.max_tokens,
        )

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.model_dir)

    @property
    def _preference_spec(self) -> PreferenceSpec:
        return self.stage.preference if isinstance(self.stage, RealtimeStage) else PreferenceSpec()

    def _sums(self, sequences: Sequence[TrainSequence], *, progress: Progress) -> Tensor:
        """Summed logprobs of the sequences' targets under the policy as it is. Shapes: [N] → [N]."""
        tables = score_sequences(self.model, sequences, settings=self._settings, progress=progress)
        return torch.stack([table.double().sum() for table in tables])

    def _score_reference(self, batch: PreparedBatch, progress: Progress) -> tuple[Tensor, ...] | None:
        if self.loss_spec.kl is KlEstimator.NONE:
            return None
        if self._reference is None:
            weights = read_checkpoint(self.model_dir)
            self._reference = Transformer(Parameters(self.arch, weights, dtype=self.parameters.dtype, trainable=False))
        return score_sequences(self._reference, batch.sequences, settings=self._settings, progress=progress)

    def _advantages(self, batch: PreparedBatch, reference: tuple[Tensor, ...] | None) -> Tensor:
        """Weighted advantages by sequence: every segment of a rollout carries the rollout's, preferences carry 0."""
        penalties = torch.zeros(len(batch.rollouts), dtype=torch.float64)
        if reference is not None:
            # k1 of the sampling policy to the reference, summed over the rollout, as a penalty without a gradient.
            for s, rollout in enumerate(batch.rollout_of):
                mask = torch.tensor(batch.sequences[s].loss_mask, dtype=torch.bool)
                k1 = (batch.behaviour[s] - reference[s])[mask].sum().item()
                penalties[rollout] += self.loss_spec.kl_coefficient * k1
        gradient = [n for n, r in enumerate(batch.rollouts) if r.objective is Objective.POLICY_GRADIENT]
        values = torch.zeros(len(batch.rollouts))
        if gradient:
            values[gradient] = self._worth([batch.rollouts[n] for n in gradient], penalties[gradient])
        weights = torch.tensor([rollout.weight for rollout in batch.rollouts])
        return (values * weights)[torch.tensor(batch.rollout_of)]

    def _worth(self, rollouts: Sequence[TrainRollout], penalties: Tensor) -> Tensor:
        """Advantages as they were given, or, unless all were, by the stage's kind. Shapes: [B] → [B]."""
        given = [rollout.advantage for rollout in rollouts if rollout.advantage is not None]
        if len(given) == len(rollouts):
            return (torch.tensor(given, dtype=torch.float64) - (penalties - penalties.mean())).float()
        rewards = [rollout.reward - penalty for rollout, penalty in zip(rollouts, penalties.tolist(), strict=True)]
        return compute_advantages(self.loss_spec.advantage, rewards, [rollout.group for rollout in rollouts])

    def weights(self) -> dict[str, Tensor]:
        """The policy as published: bf16, by checkpoint name. A copy."""
        return self.parameters.named(self.parameters.current())

    def base_weights(self) -> dict[str, Tensor]:
        """The weights that were last published (or loaded): what a delta is made from."""
        return self.weights() if self._base is None else self.parameters.named(self._base)

    def mark_published(self) -> None:
        """The current weights stand in the store: they are the next delta's base."""
        self._base = None

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder of the current policy. Raises: ModelError when the folder exists."""
        write_checkpoint(folder, self.weights(), like=self.model_dir)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs that is a tensor; views, valid until the next step."""
        tensors = {"master": self.parameters.master.detach(), "generator": self.generator.get_state()}
        for name, value in self.optimizer.state.get(self.parameters.master, {}).items():
            tensors[f"optimizer.{name}"] = value
        if self._base is not None:
            tensors["base"] = self._base
        return tensors

    def load_state(self, tensors: dict[str, Tensor], *, steps: int) -> None:
        """Stand exactly where `state_tensors` was taken. Raises: TrainerError when they are of another model."""
        master = tensors["master"]
        if master.shape != self.parameters.master.shape:
            raise TrainerError(f"the state holds {master.numel()} weights; this model has {self.parameters.count}")
        with torch.no_grad():
            self.parameters.master.copy_(master)
        self.parameters.refresh()
        self.generator.set_state(tensors["generator"])
        prefix = "optimizer."
        moments = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        self.reset_moments()
        if moments:
            self.optimizer.state[self.parameters.master] = moments
        self._base = tensors.get("base")
        self.steps = steps
        release_freed()
