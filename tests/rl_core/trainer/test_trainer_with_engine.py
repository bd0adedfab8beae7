"""The embedded engine samples, the trainer scores the same tokens: logprobs, routes and versions fit together."""

import pytest
import torch

from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import ComputeDtype as EngineDtype
from rl_core.engines.request import Request
from rl_core.models.parameters import ComputeDtype
from rl_core.trainer.batch import TrainRollout
from rl_core.trainer.trainer import Trainer
from rl_core.types import SamplingParams, TokenSegment, Trajectory, VersionRef, VersionSpan
from tests.rl_core.engines.engine_factories import make_model_folder
from tests.rl_core.trainer.rollouts import make_stage

torch.set_num_threads(1)


def sample(engine: Engine, *, routed: bool, temperature: float) -> list[TrainRollout]:
    rollouts = []
    for group in range(2):
        prompt = [65 + group, 66, 67, 68, 69, 70]
        sampling = [SamplingParams(max_tokens=12, temperature=temperature, seed=100 * group + a) for a in range(4)]
        waiting = [engine.submit(Request(prompt=prompt, sampling=s, routes=routed)) for s in sampling]
        for attempt, (sequence, params) in enumerate(zip(waiting, sampling, strict=True)):
            got = sequence.future.result(timeout=60)
            n, m = len(prompt), len(got.token_ids)
            segment = TokenSegment(
                token_ids=[*prompt, *got.token_ids],
                loss_mask=[0] * n + [1] * m,
                logprobs=[0.0] * n + got.logprobs,
                spans=[VersionSpan(n, n + m, "run:0-0")],
                sampling=params,
                routes=got.routes,
            )
            trajectory = Trajectory(task_id="t", messages=[], segments=[segment])
            blob = Trajectory.from_bytes(trajectory.to_bytes())
            rollouts.append(TrainRollout(f"{group}-{attempt}", f"g{group}", float(attempt % 2), blob))
    return rollouts


@pytest.mark.parametrize(("routed", "temperature"), [(False, 1.0), (False, 0.6), (True, 1.0)])
def test_on_policy_samples_have_no_mismatch_and_learning_reaches_the_engine(tmp_path, routed, temperature):
    folder = make_model_folder(tmp_path / "model", routed=routed, dtype=torch.bfloat16)
    codec = ChatTokenizer.load(folder)
    engine = Engine.load(folder, codec=codec, dtype=EngineDtype.FLOAT32)
    try:
        trainer = Trainer(folder, stage=make_stage(), seed=0, dtype=ComputeDtype.FP32)
        for step in range(2):  # the second on the weights that the first made
            metrics = trainer.step(sample(engine, routed=routed, temperature=temperature))
            assert metrics.k3_behaviour < 1e-8, step
            assert metrics.max_ratio == pytest.approx(1.0, abs=1e-3)
            assert metrics.ess > 1 - 1e-6
            if routed:
                assert metrics.routing_disagreement == pytest.approx(0.0, abs=0.02)
            engine.commit(engine.stage(trainer.weights()), version=VersionRef("run", 0, step + 1))
            trainer.mark_published()
    finally:
        engine.close()
