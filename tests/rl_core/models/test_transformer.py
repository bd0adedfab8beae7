import random

import pytest
import torch
from torch import Tensor

from rl_core.errors import TrajectoryError
from rl_core.models.checkpoint import read_checkpoint
from rl_core.models.packing import TrainSequence, build_packs
from rl_core.models.parameters import ComputeDtype
from rl_core.models.transformer import Replay, Transformer
from tests.rl_core.models.tiny_models import make_folder, make_transformer

torch.set_num_threads(1)


def make_group(
    *, prompt: int, branches: list[int], seed: int, temperature: float = 1.0, system: int = 0
) -> list[TrainSequence]:
    """Attempts at one prompt: sampled tokens, a tool's answer (not trained on), sampled tokens again."""
    rng = random.Random(seed)
    shared = list(range(40, 40 + system)) + [rng.randrange(97) for _ in range(prompt - system)]
    sequences = []
    for length in branches:
        own = [rng.randrange(97) for _ in range(length)]
        mask = [0] * prompt + [0 if length > 4 and 2 <= i < 4 else 1 for i in range(length)]
        sequences.append(TrainSequence(shared + own, mask, temperature))
    return sequences


def mixed_batch() -> list[TrainSequence]:
    """Groups with one system message, attempts that begin or are alike, single attempts, one that shares nothing."""
    common = make_group(prompt=14, branches=[9, 9, 12], seed=1, system=8)
    twin = TrainSequence(list(common[0].token_ids), common[0].loss_mask)
    start = [*common[1].token_ids[:20], 3, 4, 5]
    return [
        *common,
        *make_group(prompt=11, branches=[6], seed=2, temperature=0.7, system=8),
        *make_group(prompt=1, branches=[5, 5], seed=3),
        *make_group(prompt=12, branches=[2, 1], seed=4, system=8),
        twin,
        TrainSequence(start, [0] * 14 + [1] * 9),
        TrainSequence(start[:16], [0] * 14 + [1] * 2, temperature=0.9),
    ]


def coefficient(owner: int, index: int) -> float:
    return ((owner * 7 + index * 3) % 11 - 5) / 7


def hf_model(folder, routes_hook=None):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")


def hf_reference(folder, sequences: list[TrainSequence]) -> tuple[dict[tuple[int, int], float], dict[str, Tensor]]:
    """Logprobs by (sequence, position), and gradients of Σ coefficient · logprob, one unshared sequence at a time."""
    model = hf_model(folder)
    logprobs: dict[tuple[int, int], float] = {}
    for number, sequence in enumerate(sequences):
        logits = model(torch.tensor([sequence.token_ids])).logits[0] / sequence.temperature
        table = torch.log_softmax(logits, dim=-1)
        total = torch.zeros(())
        for index, masked in enumerate(sequence.loss_mask):
            if masked:
                logprob = table[index - 1, sequence.token_ids[index]]
                logprobs[number, index] = logprob.item()
                total = total + coefficient(number, index) * logprob
        total.backward()
    return logprobs, {name: p.grad for name, p in model.named_parameters()}


def run_ours(model: Transformer, sequences: list[TrainSequence], *, budget: int, replay: Replay | None = None):
    logprobs: dict[tuple[int, int], float] = {}
    packs = build_packs(sequences, token_budget=budget)
    for pack in packs:
        out = model.forward(pack, train=True, replay=replay)
        keys = list(zip(pack.owner.tolist(), pack.index.tolist(), strict=True))
        weights = torch.tensor([coefficient(*key) for key in keys])
        (out.logprobs * weights).sum().backward()
        logprobs.update(zip(keys, out.logprobs.tolist(), strict=True))
    grad = model.parameters.grad
    assert grad is not None
    return logprobs, model.parameters.named(grad), packs


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert set(ours) <= set(theirs)
    for name, grad in ours.items():
        error = (grad - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def per_expert(gradients: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """transformers' fused expert gradients under checkpoint names."""
    out: dict[str, Tensor] = {}
    for name, grad in gradients.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            for e in range(experts):
                (
                    out[name.replace("gate_up_proj", f"{e}.w1.weight")],
                    out[name.replace("gate_up_proj", f"{e}.w3.weight")],
                ) = grad[e].chunk(2)
        elif name.endswith("experts.down_proj"):
            for e in range(experts):
                out[name.replace("down_proj", f"{e}.w2.weight")] = grad[e]
        else:
            out[name] = grad
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [20, 64, 4096])
def test_dense_forward_and_gradient_equal_transformers(tmp_path, tied, budget):
    folder = make_folder(tmp_path, tied=tied)
    sequences = mixed_batch()
    logprobs, gradients, packs = run_ours(make_transformer(folder), sequences, budget=budget)
    expected, expected_gradients = hf_reference(folder, sequences)
    assert logprobs.keys() == expected.keys()
    assert max(abs(logprobs[key] - expected[key]) for key in expected) < 2e-6
    assert_same_gradients(gradients, expected_gradients, 2e-5)
    assert (len(packs) == 1) == (budget == 4096)


@pytest.mark.parametrize("budget", [20, 4096])
def test_mixture_forward_and_gradient_equal_transformers(tmp_path, budget):
    folder = make_folder(tmp_path, experts=4)
    sequences = mixed_batch()
    logprobs, gradients, _ = run_ours(make_transformer(folder), sequences, budget=budget)
    expected, expected_gradients = hf_reference(folder, sequences)
    assert max(abs(logprobs[key] - expected[key]) for key in expected) < 2e-6
    assert_same_gradients(gradients, per_expert(expected_gradients, 4), 2e-5)


def test_shared_prompt_is_computed_once():
    sequences = make_group(prompt=50, branches=[10] * 8, seed=0)
    (pack,) = build_packs(sequences, token_budget=1000)
    assert len(pack.tokens) == 50 + 8 * 9  # the last token of a branch predicts nothing
    assert len(pack.targets) == 8 * 8


def test_groups_share_their_system_message_and_equal_attempts_cost_nothing():
    one = make_group(prompt=30, branches=[10, 10], seed=0, system=20)
    two = make_group(prompt=30, branches=[10], seed=1, system=20)
    (pack,) = build_packs(one + two + one, token_budget=1000)
    assert len(pack.tokens) == 20 + 2 * 10 + 3 * 9
    assert len(pack.targets) == 5 * 8


def test_other_recorded_experts_are_not_shared():
    (one,) = make_group(prompt=6, branches=[3], seed=0)
    routes = torch.zeros(8, 2, 2, dtype=torch.int64)
    changed = routes.clone()
    changed[4] = 1
    first = TrainSequence(one.token_ids, one.loss_mask, routes=routes)
    second = TrainSequence(one.token_ids, one.loss_mask, routes=changed)
    (pack,) = build_packs([first, second], token_budget=1000)
    assert len(pack.tokens) == 8 + 4
    assert pack.routes is not None
    assert pack.routes.sum() == 4


def test_packs_are_filled_evenly():
    packs = build_packs(make_group(prompt=100, branches=[51] * 9, seed=0), token_budget=400)
    assert sorted(len(pack.tokens) for pack in packs) == [100 + 4 * 50, 100 + 5 * 50]


@pytest.mark.parametrize(("mask", "message"), [([0, 0], "without sampled tokens"), ([1, 0], "start with a prompt")])
def test_what_cannot_be_trained_on_is_refused(mask, message):
    with pytest.raises(TrajectoryError, match=message):
        build_packs([TrainSequence([1, 2], mask)], token_budget=10)


def test_entropy_is_that_of_the_distribution_sampled_from(tmp_path):
    folder = make_folder(tmp_path, std=0.5)
    sequences = make_group(prompt=4, branches=[3], seed=5, temperature=0.5)
    (pack,) = build_packs(sequences, token_budget=100)
    out = make_transformer(folder).forward(pack, train=False)
    logits = hf_model(folder)(torch.tensor([sequences[0].token_ids])).logits[0] / 0.5
    expected = torch.distributions.Categorical(logits=logits[3:6]).entropy()
    torch.testing.assert_close(out.entropies, expected, rtol=1e-5, atol=1e-5)


def test_long_targets_recompute_their_logits_with_the_same_gradient(tmp_path, monkeypatch):
    folder = make_folder(tmp_path)
    sequences = mixed_batch()
    _, plain, _ = run_ours(make_transformer(folder), sequences, budget=4096)
    monkeypatch.setattr("rl_core.models.head.CHUNK_ROWS", 5)
    monkeypatch.setattr("rl_core.models.head.KEPT_CHUNKS", 2)
    _, chunked, _ = run_ours(make_transformer(folder), sequences, budget=4096)
    assert_same_gradients(chunked, plain, 1e-5)


def test_bf16_stays_near_fp32(tmp_path):
    folder = make_folder(tmp_path)
    sequences = mixed_batch()
    exact, exact_gradients, _ = run_ours(make_transformer(folder), sequences, budget=4096)
    rough, rough_gradients, _ = run_ours(make_transformer(folder, dtype=ComputeDtype.BF16), sequences, budget=4096)
    assert 0 < max(abs(rough[key] - exact[key]) for key in exact) < 0.05
    assert_same_gradients(rough_gradients, exact_gradients, 0.1)


def test_checkpoint_names_are_those_of_the_folder(tmp_path):
    for experts in (0, 4):
        folder = make_folder(tmp_path, experts=experts)
        model = make_transformer(folder)
        on_disk = read_checkpoint(folder)
        held = model.parameters.named(model.parameters.rounded())
        assert held.keys() == on_disk.keys()
        assert all(torch.equal(held[name], on_disk[name]) for name in held)
