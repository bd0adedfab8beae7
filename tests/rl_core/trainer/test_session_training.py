"""A rollout of several segments is one rollout: the reward reaches every sampled token once, summaries included."""

import copy
import random

import pytest
import torch

from rl_core.chat import ChatTokenizer
from rl_core.models.architecture import read_architecture
from rl_core.models.parameters import ComputeDtype
from rl_core.session_specs import CompactionKind, CompactionSpec
from rl_core.specs import AdvantageKind, LossSpec, OptimizerSpec, RlStage
from rl_core.trainer.batch import TrainRollout, prepare_batch
from rl_core.trainer.trainer import Trainer
from rl_core.types import CompactionMessage, Role, SamplingParams
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.digging import SCRATCHING, play
from tests.rl_core.models.tiny_models import make_folder

torch.set_num_threads(1)

SUMMARIES = ["A, B and C were sand.", "D and E, too."]
DIGS = [f"<dig>{mark}</dig>" for mark in "ABCDEF"]
TURNS = [*DIGS[:3], SUMMARIES[0], *DIGS[3:], SUMMARIES[1], "It is at F."]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer.load(chat_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), vocab_size=304, max_position_embeddings=4096)


@pytest.fixture
async def chain(chat):
    """A session of three segments, with logprobs as this near-uniform policy would have given."""
    session, _ = await play(chat, TURNS, environment=SCRATCHING)
    return plausible(session.trajectory)


def plausible(trajectory):
    rng = random.Random(0)
    for segment in trajectory.segments:
        segment.logprobs = [-5.7 + rng.uniform(-0.3, 0.3) if m else 0.0 for m in segment.loss_mask]
    return trajectory


def make_stage(**loss):
    return RlStage(
        sampling=SamplingParams(max_tokens=120),
        max_turns=8,
        max_context_tokens=4096,
        compaction=CompactionSpec(kind=CompactionKind.SUMMARISE, summary_tokens=200),
        loss=LossSpec(**loss),
        optimizer=OptimizerSpec(learning_rate=1e-3, clip_norm=1e9),
    )


def gradient(folder, rollouts, **loss):
    trainer = Trainer(folder, stage=make_stage(**loss), seed=0, dtype=ComputeDtype.FP32)
    metrics = trainer.step(rollouts)
    return {name: t.clone() for name, t in trainer.parameters.named(trainer.parameters.grad).items()}, metrics


def summaries_of(trajectory):
    """Segment, start and end of every summary."""
    return [(m.segment, m.start, m.end) for m in trajectory.messages if m.name == CompactionMessage.SUMMARY]


def without(trajectory, spans):
    """The same trajectory, where these tokens are context."""
    copied = copy.deepcopy(trajectory)
    for segment, start, end in spans:
        one = copied.segments[segment]
        one.loss_mask[start:end] = [0] * (end - start)
        one.logprobs[start:end] = [0.0] * (end - start)
        one.spans = [span for span in one.spans if not start <= span.start < end]
    copied.validate()
    return copied


def hand_gradient(folder, trajectory, spans, *, advantage, stage, attempts):
    """−min(ρ, C)·A·logprob of these tokens alone, by transformers and autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    most = 8 * 120 + 7 * 200
    for number, start, end in spans:
        segment = trajectory.segments[number]
        table = torch.log_softmax(model(torch.tensor([segment.token_ids[:end]])).logits[0], dim=-1)
        loss = torch.zeros(())
        for t in range(start, end):
            logprob = table[t - 1, segment.token_ids[t]]
            ratio = torch.exp(logprob.detach() - segment.logprobs[t]).clamp(max=stage.loss.tis_cap)
            loss = loss - ratio * advantage * logprob
        (loss * stage.loss.scale / (attempts * most)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


async def test_summary_tokens_get_the_gradient_of_the_final_reward(folder, chain, chat):
    spans = summaries_of(chain)
    assert [chat.decode(chain.segments[s].token_ids[a:b]) for s, a, b in spans] == SUMMARIES
    other = plausible((await play(chat, ["It is at A."], environment=SCRATCHING))[0].trajectory)
    losing = TrainRollout("other", "g", 0.0, other)
    whole, _ = gradient(folder, [TrainRollout("chain", "g", 1.0, chain), losing])
    bare, _ = gradient(folder, [TrainRollout("chain", "g", 1.0, without(chain, spans)), losing])
    expected = hand_gradient(folder, chain, spans, advantage=0.5, stage=make_stage(), attempts=2)
    for name, theirs in expected.items():
        if name in whole:
            ours = whole[name] - bare[name]
            assert ours.abs().max() > 1e-5, name
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


async def test_every_sampled_token_of_the_chain_is_trained_once(folder, chain):
    batch = prepare_batch([TrainRollout("chain", "g", 1.0, chain)], read_architecture(folder), replay=False)
    assert batch.trained_tokens == batch.longest_rollout_tokens() == chain.sampled_tokens()
    trained = [
        token
        for sequence in batch.sequences
        for token, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True)
        if mask
    ]
    said = [
        token
        for message in chain.messages
        if message.role is Role.ASSISTANT
        for token in chain.segments[message.segment].token_ids[message.start : message.end]
    ]
    assert trained == said


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(AdvantageKind.DR_GRPO, [0.5, -0.5]), (AdvantageKind.GRPO, [1.0, -1.0]), (AdvantageKind.RLOO, [1.0, -1.0])],
)
async def test_a_chain_counts_as_one_attempt_whatever_its_segments(folder, chain, chat, kind, expected):
    other = plausible((await play(chat, ["It is at A."], environment=SCRATCHING))[0].trajectory)
    rollouts = [TrainRollout("chain", "g", 1.0, chain), TrainRollout("other", "g", 0.0, other)]
    trainer = Trainer(folder, stage=make_stage(advantage=kind), seed=0, dtype=ComputeDtype.FP32)
    batch = prepare_batch(rollouts, trainer.arch, replay=False)
    assert trainer._advantages(batch, None).tolist() == pytest.approx([expected[0]] * 3 + [expected[1]])
    metrics = trainer.step(rollouts)
    assert (metrics.rollouts, metrics.groups) == (2, 1)
    assert metrics.advantage_abs_mean == pytest.approx(abs(expected[0]))
    assert metrics.trained_tokens == chain.sampled_tokens() + other.sampled_tokens()


async def test_the_mean_advantage_is_that_of_rollouts(folder, chain, chat):
    other = plausible((await play(chat, ["It is at A."], environment=SCRATCHING))[0].trajectory)
    rollouts = [TrainRollout("chain", "g", 1.0, chain, 0.9), TrainRollout("other", "g", 0.0, other, -0.1)]
    _, metrics = gradient(folder, rollouts)
    assert metrics.advantage_abs_mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 40),
        ({"max_turns": 30}, 600),
        ({"max_sampled_tokens": 33}, 33),
        ({"max_turns": 30, "compaction": CompactionSpec(kind=CompactionKind.DROP_TOOL_RESULTS)}, 600),
        ({"max_turns": 30, "compaction": CompactionSpec(kind=CompactionKind.SUMMARISE, summary_tokens=100)}, 3500),
    ],
)
def test_the_most_that_an_attempt_may_sample(change, most):
    assert RlStage(**change).most_sampled_tokens == most
