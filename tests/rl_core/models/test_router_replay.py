import random

import pytest
import torch

from rl_core.models.moe import RoutingCounts, choose_experts
from rl_core.models.packing import TrainSequence, build_packs
from rl_core.models.parameters import ComputeDtype
from rl_core.models.transformer import Replay
from rl_core.trainer.mismatch import measure_mismatch
from tests.rl_core.models.tiny_models import make_folder, make_transformer

torch.set_num_threads(1)

SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1]])


def choose(recorded, *, plausibility: float = 0.0, scores: torch.Tensor = SCORES):
    counts = RoutingCounts()
    given = None if recorded is None else torch.tensor(recorded)
    chosen = choose_experts(scores, given, top_k=2, plausibility=plausibility, counts=counts)
    return [sorted(row) for row in chosen.tolist()], counts


@pytest.mark.parametrize(
    ("recorded", "plausibility", "expected", "disagreeing", "dropped"),
    [
        (None, 0.0, [0, 1], 0, 0),
        ([[1, 0]], 0.0, [0, 1], 0, 0),  # the order of experts says nothing
        ([[2, 3]], 0.0, [2, 3], 1, 0),
        ([[-1, -1]], 0.0, [0, 1], 0, 0),  # not recorded: the router's own
        # The lowest of the router's own two has 0.3, so the bounds are 0.18 and 0.3.
        ([[0, 3]], 0.6, [0, 1], 1, 1),  # 0.1 is implausible, 1 is the next candidate
        ([[2, 3]], 0.6, [0, 2], 1, 1),  # 0.2 stays, 0 is the router's first
        ([[3, 2]], 1.0, [0, 1], 1, 2),
        ([[1, 0]], 1.0, [0, 1], 0, 0),  # the router's own top-k is always plausible
    ],
)
def test_recorded_experts_override_where_plausible(recorded, plausibility, expected, disagreeing, dropped):
    chosen, counts = choose(recorded, plausibility=plausibility)
    assert chosen == [expected]
    assert (counts.disagreeing, counts.dropped) == (disagreeing, dropped)
    assert counts.rows == (recorded is not None and recorded != [[-1, -1]])


def sequences_with_routes(*, groups: int, seed: int, length: int = 24, vocab: int = 97) -> list[TrainSequence]:
    rng = random.Random(seed)
    out = []
    for _ in range(groups):
        prompt = [rng.randrange(vocab) for _ in range(8)]
        for _ in range(4):
            own = [rng.randrange(vocab) for _ in range(length)]
            out.append(TrainSequence(prompt + own, [0] * 8 + [1] * length))
    return out


def hf_engine(folder, sequences: list[TrainSequence]):
    """Logprobs and routed experts of transformers in bf16, one sequence at a time: another implementation."""
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
    experts: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: experts.append(out[2]))
    logprobs, routed = [], []
    with torch.no_grad():
        for sequence in sequences:
            experts.clear()
            logits = model(torch.tensor([sequence.token_ids])).logits[0].float()
            table = torch.log_softmax(logits, dim=-1)[:-1]
            logprobs.append(table.gather(1, torch.tensor(sequence.token_ids)[1:, None]).squeeze(1))
            routed.append(torch.stack(experts, dim=1)[:-1])  # the last token is never fed back
    return logprobs, routed


def k3_against_engine(folder, sequences, logprobs, *, replay: bool):
    model = make_transformer(folder, dtype=ComputeDtype.BF16)
    counts = RoutingCounts()
    trained, behaviour = [], []
    for pack in build_packs(sequences, token_budget=400):
        out = model.forward(pack, train=False, replay=Replay(enabled=replay))
        counts.add(out.routing)
        trained.append(out.logprobs)
        pairs = zip(pack.owner.tolist(), pack.index.tolist(), strict=True)
        behaviour.append(torch.stack([logprobs[owner][index - 1] for owner, index in pairs]))
    return measure_mismatch(torch.cat(trained), torch.cat(behaviour)).k3, counts


def test_replay_lowers_k3_in_bf16_at_least_five_fold(tmp_path):
    folder = make_folder(tmp_path, experts=16, seed=3, std=0.12, hidden_size=64, num_hidden_layers=4, vocab_size=97)
    sequences = sequences_with_routes(groups=6, seed=0)
    logprobs, routed = hf_engine(folder, sequences)
    recorded = [
        TrainSequence(s.token_ids, s.loss_mask, routes=routes) for s, routes in zip(sequences, routed, strict=True)
    ]
    free, _ = k3_against_engine(folder, recorded, logprobs, replay=False)
    replayed, counts = k3_against_engine(folder, recorded, logprobs, replay=True)
    assert 0 < counts.disagreeing < counts.rows / 10
    assert replayed * 5 <= free, f"k3 {free:.2e} → {replayed:.2e}, {counts}"


def test_replay_keeps_the_gates_gradient(tmp_path):
    folder = make_folder(tmp_path, experts=4)
    sequences = sequences_with_routes(groups=1, seed=1, length=6)
    routes = torch.randint(0, 2, (13, 3, 1), generator=torch.Generator().manual_seed(0))
    routes = torch.cat((routes, routes + 2), dim=-1)
    forced = [TrainSequence(s.token_ids, s.loss_mask, routes=routes) for s in sequences]
    model = make_transformer(folder)
    (pack,) = build_packs(forced, token_budget=400)
    out = model.forward(pack, train=True, keep_experts=True)
    out.logprobs.sum().backward()
    assert out.experts is not None
    assert pack.routes is not None
    assert torch.equal(out.experts.sort(dim=-1).values, pack.routes.sort(dim=-1).values)
    grad = model.parameters.grad
    assert grad is not None
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    analytic = model.parameters.view(grad, gate)[2, 5].item()
    assert analytic != 0.0
    numeric = []
    for shift in (1e-2, -1e-2):  # fp32: a wide central difference
        moved = make_transformer(folder)
        moved.parameters.view(moved.parameters.compute, gate)[2, 5] += shift
        numeric.append(moved.forward(pack, train=False).logprobs.double().sum().item())
    assert analytic == pytest.approx((numeric[0] - numeric[1]) / 2e-2, rel=0.02)
