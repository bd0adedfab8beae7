import random

import pytest
import torch

from rl_core.errors import TrainerError, TrajectoryError
from rl_core.models.parameters import ComputeDtype
from rl_core.specs import AdvantageKind, KlEstimator
from rl_core.trainer.batch import TrainRollout, prepare_batch
from rl_core.trainer.trainer import Trainer
from rl_core.types import SamplingParams
from tests.rl_core.models.tiny_models import make_folder
from tests.rl_core.trainer.rollouts import (
    encode_routes,
    make_realtime,
    make_rollouts,
    make_segment,
    make_stage,
    make_trajectory,
)

torch.set_num_threads(1)


def make_trainer(folder, *, stage=None, seed: int = 0, budget: int = 40) -> Trainer:
    return Trainer(folder, stage=stage or make_stage(), seed=seed, dtype=ComputeDtype.FP32, token_budget=budget)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def hf_gradient(folder, rollouts, stage):
    """The objective written out with transformers: one padded-free sequence at a time, autograd through everything."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    means: dict[str, list[float]] = {}
    for rollout in rollouts:
        means.setdefault(rollout.group, []).append(rollout.reward)
    for rollout in rollouts:
        advantage = rollout.reward - sum(means[rollout.group]) / len(means[rollout.group])
        for segment in rollout.trajectory.segments:
            table = torch.log_softmax(model(torch.tensor([segment.token_ids])).logits[0], dim=-1)
            loss = torch.zeros(())
            for t, masked in enumerate(segment.loss_mask):
                if masked:
                    logprob = table[t - 1, segment.token_ids[t]]
                    ratio = torch.exp(logprob.detach() - segment.logprobs[t]).clamp(max=stage.loss.tis_cap)
                    loss = loss - ratio * advantage * logprob
            (loss * stage.loss.scale / (len(rollouts) * stage.sampling.max_tokens * stage.max_turns)).backward()
    return model


def test_step_equals_the_objective_written_out_with_transformers(folder):
    stage, rollouts = make_stage(), make_rollouts()
    trainer = make_trainer(folder, stage=stage)
    model = hf_gradient(folder, rollouts, stage)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), stage.optimizer.clip_norm)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0).step()
    metrics = trainer.step(rollouts)
    assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)
    ours = trainer.parameters.named(trainer.parameters.master)
    for name, theirs in model.named_parameters():
        if name in ours:
            # AdamW's first step is about the sign of each gradient: compare where the gradient is not noise.
            clear = theirs.grad.abs() > 1e-6
            torch.testing.assert_close(ours[name][clear], theirs.detach()[clear], rtol=0, atol=2e-5)


def test_learning_raises_the_rewarded_attempts(folder):
    trainer = make_trainer(folder)
    rollouts = make_rollouts()
    before = trainer.step(rollouts)
    for _ in range(5):
        after = trainer.step(rollouts)
    batch = prepare_batch(rollouts, trainer.arch, replay=False)
    assert before.step == 1
    assert after.step == 6
    assert before.max_ratio < after.max_ratio  # rewarded tokens became likelier than when they were sampled
    assert after.entropy < before.entropy
    assert after.trained_tokens == batch.trained_tokens


def test_metrics_count_what_was_trained(folder):
    rollouts = make_rollouts() + make_rollouts(groups=1, seed=9, flat=True)
    rollouts = [
        TrainRollout(f"{i}", r.group if i < 12 else "flat", r.reward, r.trajectory) for i, r in enumerate(rollouts)
    ]
    greedy = make_segment(random.Random(0), prompt=[1, 2], length=5, sampling=SamplingParams(temperature=0.0))
    rollouts.append(TrainRollout("greedy", "g0", 0.0, make_trajectory([greedy])))
    metrics = make_trainer(folder).step(rollouts)
    assert metrics.untrainable_tokens == 5
    assert metrics.trained_tokens == sum(r.trajectory.sampled_tokens() for r in rollouts) - 5
    assert metrics.groups == 4
    assert metrics.share_groups_without_variance == 0.25
    assert metrics.reward_mean == pytest.approx(sum(r.reward for r in rollouts) / len(rollouts))
    assert metrics.kl_reference_k1 is None
    assert metrics.routing_disagreement is None
    assert metrics.k3_rollouts.keys() == {r.id for r in rollouts[:-1]}  # greedy tokens have no behaviour to compare
    summed = sum(metrics.k3_rollouts[r.id] * r.trajectory.sampled_tokens() for r in rollouts[:-1])
    assert summed / metrics.trained_tokens == pytest.approx(metrics.k3_behaviour)
    assert 4.0 < metrics.entropy <= 4.58  # log 97
    assert 0 < metrics.ess <= 1


def test_segments_of_a_rollout_share_its_reward(folder):
    rng = random.Random(3)
    one, two = make_segment(rng, prompt=[5, 6], length=4), make_segment(rng, prompt=[7, 8], length=4)
    other = make_segment(rng, prompt=[5, 6], length=4)
    rollouts = [
        TrainRollout("a", "g", 1.0, make_trajectory([one, two])),
        TrainRollout("b", "g", 0.0, make_trajectory([other])),
    ]
    trainer = make_trainer(folder)
    batch = prepare_batch(rollouts, trainer.arch, replay=False)
    assert trainer._advantages(batch, None).tolist() == [0.5, 0.5, -0.5]


def test_same_state_and_batch_give_the_same_bits(folder):
    roots = []
    for _ in range(2):
        trainer = make_trainer(folder)
        for seed in (1, 2):
            trainer.step(make_rollouts(seed=seed))
        roots.append(trainer.parameters.master.detach().clone())
    assert torch.equal(*roots)


def test_published_weights_are_the_rounded_master(folder):
    trainer = make_trainer(folder)
    start = trainer.weights()
    trainer.step(make_rollouts())
    assert all(torch.equal(start[n], t) for n, t in trainer.base_weights().items())
    assert all(
        torch.equal(t, trainer.parameters.named(trainer.parameters.rounded())[n]) for n, t in trainer.weights().items()
    )
    trainer.step(make_rollouts(seed=1))
    assert all(torch.equal(start[n], t) for n, t in trainer.base_weights().items())  # two steps, nothing published
    trainer.mark_published()
    assert all(torch.equal(trainer.weights()[n], t) for n, t in trainer.base_weights().items())


def test_kl_in_the_reward_pulls_back_to_the_first_version(folder):
    rollouts = make_rollouts(flat=True)  # nothing but the penalty tells attempts apart
    stage = make_stage(kl=KlEstimator.K1_REWARD, kl_coefficient=0.5)
    trainer = make_trainer(folder, stage=stage)
    metrics = trainer.step(rollouts)
    assert metrics.kl_reference_k1 == pytest.approx(0.0, abs=1e-6)  # still the first version
    assert metrics.advantage_abs_mean > 0
    assert trainer.step(rollouts).kl_reference_k1 != pytest.approx(0.0, abs=1e-4)
    assert make_trainer(folder).step(rollouts).advantage_abs_mean == 0


def test_realtime_deals_the_window_and_resets_moments(folder):
    window = [TrainRollout(r.id, r.id, r.reward, r.trajectory) for r in make_rollouts(groups=8, attempts=1, seed=4)]
    stage = make_realtime(optimizer_steps=2)
    assert stage.loss.advantage is AdvantageKind.STRATA
    trainer = make_trainer(folder, stage=stage)
    first = trainer.step(window)
    assert first.optimizer_steps == 2
    assert first.step == 1
    state = trainer.optimizer.state[trainer.parameters.master]
    assert state["step"].item() == 2
    trainer.step(window)
    assert trainer.optimizer.state[trainer.parameters.master]["step"].item() == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reward": float("nan")}, TrainerError, "score it again"),
        ({"token": 97}, TrajectoryError, "outside the model's vocabulary"),
        ({"logprob": float("nan")}, TrainerError, "not finite"),
        ({"greedy": True}, TrainerError, "whole distribution"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(folder, change, error, message):
    segment = make_segment(random.Random(0), prompt=[1, 2], length=5)
    other = make_segment(random.Random(1), prompt=[1, 2], length=5)
    segment.token_ids[3] = change.get("token", 3)
    segment.logprobs[4] = change.get("logprob", -1.0)
    if "greedy" in change:
        segment.sampling = other.sampling = SamplingParams(temperature=0.0)
    rollouts = [
        TrainRollout("a", "g", change.get("reward", 1.0), make_trajectory([segment])),
        TrainRollout("b", "g", 0.0, make_trajectory([other])),
    ]
    trainer = make_trainer(folder, budget=6)  # two packs: their order is drawn before anything fails
    with pytest.raises(error, match=message):
        trainer.step(rollouts)
    untouched = make_trainer(folder)
    assert trainer.steps == 0
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(tensor, untouched.state_tensors()[name]), name


def test_routes_must_be_the_models(tmp_path):
    folder = make_folder(tmp_path, experts=4)
    trainer = make_trainer(folder)
    good = torch.zeros(6, 3, 2, dtype=torch.int64)
    good[..., 1] = 1
    for routes, message in (
        (encode_routes(good[:, :2]), "do not fit"),
        (encode_routes(good + 3), "names? expert 4"),
    ):
        segment = make_segment(random.Random(0), prompt=[1, 2], length=5, routes=routes)
        with pytest.raises(TrajectoryError, match=message):
            trainer.step([TrainRollout("a", "g", 1.0, make_trajectory([segment]))])
    for dtype in ("uint8", "uint16"):
        segment = make_segment(random.Random(0), prompt=[1, 2], length=5, routes=encode_routes(good, dtype))
        metrics = trainer.step([TrainRollout("a", "g", 1.0, make_trajectory([segment]))])
        assert metrics.routing_disagreement is not None
        assert metrics.routing_disagreement > 0.5
