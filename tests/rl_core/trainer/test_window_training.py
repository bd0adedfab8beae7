"""A window's step: rewards move the policy where they point, preferences too, and kept moments would hide a bad one."""

import dataclasses
import random

import msgspec
import pytest
import torch

from rl_core.errors import TrainerError
from rl_core.models.packing import TrainSequence
from rl_core.models.parameters import ComputeDtype
from rl_core.specs import LossKind, LossSpec, OptimizerSpec, PreferenceSpec
from rl_core.trainer.batch import TrainRollout, prepare_batch
from rl_core.trainer.gradient import GradientSettings, Minibatch, TokenRecords, accumulate_gradient, score_sequences
from rl_core.trainer.losses import dpo, kto
from rl_core.trainer.messages import RolloutRef
from rl_core.trainer.preference import Preferences, mismatched
from rl_core.trainer.trainer import Trainer
from rl_core.types import Objective, SamplingParams
from rl_core.windows.advantages import Attempt, window_advantages
from tests.rl_core.models.tiny_models import make_folder
from tests.rl_core.trainer.rollouts import make_realtime, make_rollouts, make_segment, make_trajectory

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def open_trainer(folder, **stage) -> Trainer:
    return Trainer(folder, stage=make_realtime(**stage), seed=0, dtype=ComputeDtype.FP32, token_budget=400)


def sums(trainer, sequences):
    return trainer._sums(sequences, progress=lambda _: None)


def sequence_of(rollout) -> TrainSequence:
    segment = rollout.trajectory.segments[0]
    return TrainSequence(segment.token_ids, segment.loss_mask)


def make_window(trainer, *, seed: int = 0, invert: bool = False, count: int = 24) -> list[TrainRollout]:
    """Single answers, liked when their first token is even, with the logprobs that the policy has for them now."""
    rollouts = make_rollouts(groups=count, attempts=1, length=6, seed=seed)
    liked = [(r.trajectory.segments[0].token_ids[10] % 2 == 0) != invert for r in rollouts]
    attempts = [Attempt(float(like)) for like in liked]
    advantages = window_advantages(trainer.loss_spec.advantage, attempts)
    window = []
    for rollout, like, advantage in zip(rollouts, liked, advantages, strict=True):
        segment = rollout.trajectory.segments[0]
        window.append(TrainRollout(rollout.id, "window", float(like), make_trajectory([segment]), advantage=advantage))
    table = [r.trajectory.segments[0] for r in window]
    for segment, logprobs in zip(table, token_logprobs(trainer, table), strict=True):
        segment.logprobs = logprobs
    return window


def token_logprobs(trainer, segments):
    sequences = [TrainSequence(s.token_ids, s.loss_mask, s.sampling.temperature) for s in segments]
    tables = score_sequences(trainer.model, sequences, settings=trainer._settings, progress=lambda _: None)
    return [table.tolist() for table in tables]


def gap(trainer, window) -> float:
    """By how much liked answers are likelier than the others, per answer."""
    scores = sums(trainer, [sequence_of(rollout) for rollout in window]).tolist()
    liked = [score for score, rollout in zip(scores, window, strict=True) if rollout.reward == 1.0]
    others = [score for score, rollout in zip(scores, window, strict=True) if rollout.reward == 0.0]
    return sum(liked) / len(liked) - sum(others) / len(others)


def test_rewards_move_the_policy_and_inverted_rewards_the_other_way(folder):
    moved = {}
    for invert in (False, True):
        trainer = open_trainer(folder)
        plain = make_window(trainer)
        before = gap(trainer, plain)
        metrics = trainer.step(make_window(trainer, invert=invert))
        assert metrics.optimizer_steps == 2
        assert metrics.k3_behaviour < 1e-3
        moved[invert] = gap(trainer, plain) - before
    assert moved[False] > 0.02
    assert moved[True] < -0.02


def test_kept_moments_would_hide_a_bad_window(folder, monkeypatch):
    """After three good windows, one with inverted rewards: with moments kept the harm does not show."""
    moved = {}
    for kept in (False, True):
        trainer = open_trainer(folder)
        if kept:
            monkeypatch.setattr(trainer, "reset_moments", lambda: None)
        for seed in range(3):
            trainer.step(make_window(trainer, seed=seed))
        plain = make_window(trainer, seed=9)
        before = gap(trainer, plain)
        trainer.step(make_window(trainer, seed=9, invert=True))
        moved[kept] = gap(trainer, plain) - before
    assert moved[False] < -0.02
    assert moved[False] < moved[True] - 0.02


def test_the_stored_temperature_is_what_ratios_are_taken_at(folder):
    trainer = open_trainer(folder, loss=LossSpec(kind=LossKind.PG_TIS, advantage="responders"))
    warm = make_window(trainer, count=6)
    for rollout in warm:
        rollout.trajectory.segments[0].sampling = SamplingParams(temperature=0.5, max_tokens=8)
    segments = [rollout.trajectory.segments[0] for rollout in warm]
    for segment, logprobs in zip(segments, token_logprobs(trainer, segments), strict=True):
        segment.logprobs = logprobs
    one = open_trainer(folder, optimizer_steps=1).step(warm)
    assert one.max_ratio == pytest.approx(1.0, abs=1e-4)
    for segment in segments:
        segment.sampling = SamplingParams(temperature=1.0, max_tokens=8)
    assert open_trainer(folder, optimizer_steps=1).step(warm).max_ratio > 1.05


def test_given_advantages_and_weights_are_taken_as_they_are(folder):
    """Weight w on advantage A is A·w; a kind's own advantage is not computed then."""
    masters = []
    for advantage, weight in ((0.6, 0.5), (0.3, 1.0)):
        trainer = open_trainer(folder, optimizer_steps=1)
        window = [
            TrainRollout(r.id, r.group, r.reward, r.trajectory, advantage=a, weight=w)
            for r, (a, w) in zip(make_window(trainer, count=4), [(advantage, weight), (-0.3, 1.0)] * 2, strict=True)
        ]
        trainer.step(window)
        masters.append(trainer.parameters.master.detach().clone())
    assert torch.equal(*masters)


def make_preferences(trainer, rng, *, pairs: int = 3, votes: int = 4) -> list[TrainRollout]:
    rollouts = []
    for number in range(pairs + votes):
        prompt = [rng.randrange(97) for _ in range(6)]
        segment = make_segment(rng, prompt=prompt, length=rng.randint(2, 6), sampling=GREEDY)
        pair = number < pairs
        rollouts.append(
            TrainRollout(
                f"p{number}",
                "window",
                0.0,
                make_trajectory([segment]),
                advantage=1.0 if pair or number % 2 else -1.0,
                objective=Objective.DPO if pair else Objective.KTO,
                demonstration=f"better {number}" if pair else "",
            )
        )
    return rollouts


def spell(text: str) -> list[int]:
    return [ord(letter) % 97 for letter in text]


def hf_sums(model, sequences):
    out = []
    for sequence in sequences:
        table = torch.log_softmax(model(torch.tensor([list(sequence.token_ids)])).logits[0], dim=-1)
        targets = [t for t, masked in enumerate(sequence.loss_mask) if masked]
        out.append(sum(table[t - 1, sequence.token_ids[t]] for t in targets))
    return torch.stack(out)


def hf_model(folder, weights=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if weights is not None:
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    return model


def test_preference_gradient_is_that_of_the_losses_written_out_with_transformers(folder):
    """In a later minibatch, where the policy has left the reference: pairs, votes and their KL all count."""
    trainer = open_trainer(folder, optimizer=OptimizerSpec(learning_rate=3e-3))
    spec = PreferenceSpec(beta=0.3, kto_weight=0.7, dpo_weight=1.3, undesirable_weight=1.5)
    rollouts = make_preferences(trainer, random.Random(4))
    batch = prepare_batch(rollouts, trainer.arch, replay=False, turn=spell)
    everything = tuple(range(len(batch.sequences)))
    preferences = Preferences(batch, [(), everything], spec, lambda sequences: sums(trainer, sequences))
    trainer.step(make_window(trainer))  # the first update of the window
    push = preferences.push(1)

    reference, model = hf_model(folder), hf_model(folder, trainer.weights())
    ratios = hf_sums(model, batch.sequences) - hf_sums(reference, batch.sequences).detach()
    pairs = sorted(batch.chosen)
    votes = [index for index in everything if batch.objective(index) is Objective.KTO]
    shuffled = mismatched(batch, everything)
    z = (hf_sums(model, shuffled) - hf_sums(reference, shuffled)).mean().detach().clamp(min=0.0)
    labels = torch.tensor([rollouts[batch.rollout_of[index]].advantage for index in votes])
    loss = 0.7 * kto(ratios[votes], z.expand(len(votes)), labels, spec).sum()
    loss = loss + 1.3 * dpo(ratios[pairs], ratios[[index - 1 for index in pairs]], labels, spec).sum()
    loss.backward()
    assert push.loss == pytest.approx(loss.item(), rel=1e-4)
    assert float(z) > 0

    trainer.parameters.grad.zero_()
    minibatch = Minibatch(batch, everything, torch.zeros(len(everything)), None, 1.0, push.coefficients)
    settings = GradientSettings(trainer.loss_spec, 400)
    records = TokenRecords()
    accumulate_gradient(
        trainer.model, minibatch, records, settings=settings, generator=trainer.generator, progress=lambda _: None
    )
    ours = trainer.parameters.named(trainer.parameters.grad)
    for name, theirs in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], theirs.grad, rtol=2e-3, atol=2e-5)
    assert records.loss == 0.0
    assert records.preference_tokens == sum(sum(sequence.loss_mask) for sequence in batch.sequences)


def test_the_first_minibatch_stands_at_the_reference(folder):
    trainer = open_trainer(folder)
    batch = prepare_batch(make_preferences(trainer, random.Random(4)), trainer.arch, replay=False, turn=spell)

    def never(sequences):
        raise AssertionError(f"{len(sequences)} sequences were scored for nothing")

    push = Preferences(batch, [tuple(range(len(batch.sequences)))], PreferenceSpec(beta=0.2), never).push(0)
    # σ(0) = 1/2: a pair pushes by β/2, a vote by β/4.
    expected = [-0.1 if index in batch.chosen else 0.1 for index in range(6)] + [0.05, -0.05, 0.05, -0.05]
    signs = [r.advantage for r in batch.rollouts[3:]]
    assert signs == [1.0, -1.0, 1.0, -1.0]
    expected[6:] = [-0.05 * sign for sign in signs]
    assert push.coefficients.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("pairs", "votes"), [(6, 0), (0, 8), (4, 4)])
def test_a_window_of_preferences_alone_trains(folder, monkeypatch, pairs, votes):
    trainer = open_trainer(folder)
    monkeypatch.setattr(Trainer, "_tokenizer", type("Speller", (), {"turn": staticmethod(spell)})())
    window = make_preferences(trainer, random.Random(1), pairs=pairs, votes=votes)
    metrics = trainer.step(window)
    assert metrics.preference_rollouts == len(window)
    assert metrics.preference_margin is not None
    assert metrics.preference_tokens > 0
    assert (metrics.trained_tokens, metrics.k3_behaviour, metrics.entropy) == (0, None, None)
    batch = prepare_batch(window, trainer.arch, replay=False, turn=spell)
    moved = sums(trainer, batch.sequences) - sums(open_trainer(folder), batch.sequences)
    pushed_up = [i for i in range(len(moved)) if i in batch.chosen or (batch.objective(i) is Objective.KTO
                 and batch.rollouts[batch.rollout_of[i]].advantage == 1.0)]  # fmt: skip
    rest = [i for i in range(len(moved)) if i not in pushed_up]
    assert moved[pushed_up].mean() > moved[rest].mean() + 0.02


def test_a_mixed_window_counts_what_each_objective_trained(folder, monkeypatch):
    trainer = open_trainer(folder)
    monkeypatch.setattr(Trainer, "_tokenizer", type("Speller", (), {"turn": staticmethod(spell)})())
    sampled = make_window(trainer, count=8)
    metrics = trainer.step([*sampled, *make_preferences(trainer, random.Random(2))])
    assert metrics.rollouts == 15
    assert metrics.preference_rollouts == 7
    assert metrics.trained_tokens == sum(r.trajectory.sampled_tokens() for r in sampled)
    assert metrics.reward_mean == pytest.approx(sum(r.reward for r in sampled) / 8)
    assert metrics.k3_behaviour < 1e-3  # a demonstration has no behaviour logprob: it must not enter


def test_a_long_demonstration_is_cut(folder):
    trainer = open_trainer(folder)
    window = make_preferences(trainer, random.Random(4), pairs=1, votes=0)
    window = [dataclasses.replace(window[0], demonstration="x" * 500)]
    batch = prepare_batch(window, trainer.arch, replay=False, turn=spell, max_demonstration_tokens=20)
    assert [sum(sequence.loss_mask) for sequence in batch.sequences][1] == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": Objective.KTO, "advantage": 0.5}, "neither liked"),
        ({"objective": Objective.DPO, "demonstration": ""}, "a demonstration"),
        ({"weight": float("nan")}, "leave it out"),
        ({"weight": -1.0}, "leave it out"),
        ({"advantage": float("inf")}, "leave it out"),
    ],
)
def test_what_does_not_fit_its_objective_is_refused(folder, change, message):
    trainer = open_trainer(folder)
    window = make_window(trainer, count=3)
    with pytest.raises(TrainerError, match=message):
        trainer.step([*window, dataclasses.replace(window[0], **change)])
    assert trainer.steps == 0


def test_old_requests_are_read_as_before():
    ref = msgspec.convert({"id": "a", "group": "g", "reward": 1.0, "blob": "b"}, type=RolloutRef)
    assert (ref.advantage, ref.weight, ref.objective) == (None, 1.0, Objective.POLICY_GRADIENT)
