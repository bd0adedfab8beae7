"""The engine's logprobs against a plain forward of transformers in fp32."""

from __future__ import annotations

import itertools
from pathlib import Path

import engine_factories as make
import pytest
import torch

from rl_core.engines import weights as weights_module
from rl_core.engines.request import Request
from rl_core.types import SamplingParams

TOLERANCE = 1e-4


def worst_difference(folder: Path, *, sequences: int, max_seqs: int) -> float:
    """Largest difference over sampled sequences of mixed lengths, temperatures and shared prefixes."""
    model = make.hf_model(folder)
    engine = make.make_engine(folder, max_seqs=max_seqs, max_waiting=sequences)
    temperatures = itertools.cycle([1.0, 0.7, 1.3, 0.0])
    jobs = []
    for index in range(sequences):
        shared = make.random_prompt(20, seed=index % 3)
        prompt = (shared if index % 2 else []) + make.random_prompt(1 + index * 7 % 60, seed=1000 + index)
        params = SamplingParams(temperature=next(temperatures), max_tokens=5 + index * 5 % 40, seed=index)
        jobs.append((prompt, params, engine.submit(Request(prompt=prompt, sampling=params))))
    worst = 0.0
    for prompt, params, sequence in jobs:
        result = sequence.future.result(120)
        assert len(result.logprobs) == len(result.token_ids) > 0
        wanted = make.reference_logprobs(model, prompt, result.token_ids, params.temperature)
        worst = max(worst, float((wanted - torch.tensor(result.logprobs)).abs().max()))
    engine.close()
    return worst


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("max_seqs", [1, 5, 16])
def test_logprobs_equal_the_plain_forward(tmp_path: Path, routed: bool, max_seqs: int) -> None:
    folder = make.make_model_folder(tmp_path / "m", routed=routed)
    assert worst_difference(folder, sequences=16, max_seqs=max_seqs) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("max_seqs", [1, 2, 8, 16])
def test_logprobs_over_200_sequences(tmp_path: Path, routed: bool, max_seqs: int) -> None:
    folder = make.make_model_folder(tmp_path / "m", routed=routed)
    assert worst_difference(folder, sequences=200, max_seqs=max_seqs) < TOLERANCE


def test_experts_sorted_by_token_equal_the_plain_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "FUSED_EXPERTS_MAX", 0)
    folder = make.make_model_folder(tmp_path / "m", routed=True)
    assert worst_difference(folder, sequences=12, max_seqs=8) < TOLERANCE


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": False},
        {"num_key_value_heads": 6},
    ],
    ids=["linear-rope", "llama3-rope", "biases", "no-gqa"],
)  # fmt: skip
def test_forms_of_llama(tmp_path: Path, overrides: dict[str, object]) -> None:
    folder = make.make_model_folder(tmp_path / "m", **overrides)
    assert worst_difference(folder, sequences=8, max_seqs=4) < TOLERANCE


def test_greedy_tokens_equal_transformers_generate(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m")
    model, engine = make.hf_model(folder), make.make_engine(folder)
    prompt = make.random_prompt(17, seed=5)
    result = make.generate(engine, prompt, temperature=0.0, max_tokens=30)
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert result.token_ids == wanted[0, len(prompt) :].tolist()
    engine.close()


def test_truncated_logprobs_are_of_the_renormalised_distribution(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m")
    model, engine = make.hf_model(folder), make.make_engine(folder)
    prompt = make.random_prompt(9, seed=2)
    for top_p, top_k in ((1.0, 5), (0.8, 0), (0.7, 12)):
        result = make.generate(engine, prompt, top_p=top_p, top_k=top_k, temperature=0.9, max_tokens=20, seed=3)
        logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1].detach().double()
        for place, token in enumerate(result.token_ids):
            order = (logits[place] / 0.9).sort(descending=True)
            kept = order.values[: top_k or None]
            probabilities = torch.softmax(kept, -1)
            nucleus = int((probabilities.cumsum(-1) < top_p).sum()) + 1
            index = order.indices[:nucleus].tolist().index(token)  # a token outside the set fails here
            wanted = torch.log_softmax(kept[:nucleus], -1)[index]
            assert abs(float(wanted) - result.logprobs[place]) < TOLERANCE
    engine.close()
