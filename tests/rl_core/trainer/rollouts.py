"""Factories: random rollouts over the tiny models' vocabulary, and stages to train them with."""

from __future__ import annotations

import random

import torch

from rl_core.specs import LossSpec, OptimizerSpec, RealtimeStage, RlStage
from rl_core.trainer.batch import TrainRollout
from rl_core.types import Message, Role, Routes, SamplingParams, TokenSegment, Trajectory, VersionSpan

VERSION = "run:0-0"


def make_segment(
    rng: random.Random,
    *,
    prompt: list[int],
    length: int,
    sampling: SamplingParams | None = None,
    routes: Routes | None = None,
) -> TokenSegment:
    """A prompt and `length` sampled tokens with plausible behaviour logprobs of a near-uniform policy."""
    own = [rng.randrange(97) for _ in range(length)]
    n = len(prompt)
    return TokenSegment(
        token_ids=prompt + own,
        loss_mask=[0] * n + [1] * length,
        logprobs=[0.0] * n + [-4.57 + rng.uniform(-0.1, 0.1) for _ in range(length)],
        spans=[VersionSpan(n, n + length, VERSION)],
        sampling=sampling or SamplingParams(max_tokens=length),
        routes=routes,
    )


def make_trajectory(segments: list[TokenSegment]) -> Trajectory:
    return Trajectory(task_id="t", messages=[Message(role=Role.USER, content="x")], segments=segments)


def make_rollouts(
    *, groups: int = 3, attempts: int = 4, prompt: int = 10, length: int = 8, seed: int = 0, flat: bool = False
) -> list[TrainRollout]:
    """Groups of attempts with random rewards (`flat`: all alike)."""
    rng = random.Random(seed)
    out = []
    for g in range(groups):
        shared = [rng.randrange(97) for _ in range(prompt)]
        for a in range(attempts):
            segment = make_segment(rng, prompt=shared, length=rng.randint(2, length))
            reward = 0.5 if flat else rng.choice([0.0, 0.2, 1.0])
            out.append(TrainRollout(f"r{g}-{a}", f"g{g}", reward, make_trajectory([segment])))
    return out


def make_stage(**loss: object) -> RlStage:
    return RlStage(
        sampling=SamplingParams(max_tokens=8),
        max_turns=1,
        loss=LossSpec(**loss),
        optimizer=OptimizerSpec(learning_rate=1e-3),
    )


def make_realtime(**changes: object) -> RealtimeStage:
    return RealtimeStage(lane="demo", **changes)


def encode_routes(experts: torch.Tensor, dtype: str = "uint8") -> Routes:
    """Experts [T, L, K] as a blob."""
    tokens, layers, top_k = experts.shape
    width = {"uint8": torch.uint8, "uint16": torch.uint16}[dtype]
    return Routes(tokens, layers, top_k, dtype, experts.to(width).numpy().tobytes())
