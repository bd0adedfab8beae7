"""Swaps between decode steps, with requests in flight."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine_factories as make
import pytest
import torch
from transformers import DynamicCache

from rl_core.engines.engine import Engine
from rl_core.errors import ModelError, VersionUnavailable
from rl_core.models.checkpoint import read_checkpoint
from rl_core.types import Generated, KvMode, VersionRef, VersionSpan

TOLERANCE = 1e-4
V1, V2 = VersionRef("l", 0, 1), VersionRef("l", 0, 2)


def swap_in_flight(engine: Engine, changed: dict[str, torch.Tensor], kv: KvMode) -> list[tuple[list[int], Generated]]:
    """Prompts and results of sequences that were well under way when the weights changed."""
    engine.relabel(V1)
    staged = engine.stage(changed)
    prompts = [make.random_prompt(6 + 9 * index, seed=index) for index in range(6)]
    gate = make.Gate(10)
    sequences = [
        make.submit(
            engine, prompt, max_tokens=120, seed=i, routes=True, on_token=gate if prompt is prompts[-1] else None
        )
        for i, prompt in enumerate(prompts)
    ]
    # The decode thread stands in the gate until the commit is queued, so that the swap meets every sequence.
    assert gate.reached.wait(60)
    with ThreadPoolExecutor(1) as pool:
        committed = pool.submit(engine.commit, staged, version=V2, kv=kv)
        make.wait_until(lambda: bool(engine._scheduler(None)._commands))
        gate.open.set()
        assert committed.result(60) < 60
    return [(prompt, sequence.future.result(60)) for prompt, sequence in zip(prompts, sequences, strict=True)]


def split_of(result: Generated) -> int:
    """How many tokens the first version sampled. Spans are in order and cover everything once."""
    first, last = result.spans
    count = len(result.token_ids)
    assert (first, last) == (VersionSpan(0, first.end, str(V1)), VersionSpan(first.end, count, str(V2)))
    assert 5 < first.end < count
    return first.end


def mixed(results: list[tuple[list[int], Generated]]) -> list[tuple[list[int], Generated]]:
    """The results, every one of which the swap met in flight."""
    assert all(len(result.spans) == 2 for _, result in results)
    return results


@pytest.mark.parametrize("routed", [False, True])
def test_recompute_equals_plain_forward_of_the_last_version(tmp_path: Path, routed: bool) -> None:
    folder = make.endless_model_folder(tmp_path / "m", routed=routed)
    changed = make.perturbed(read_checkpoint(folder), seed=1)
    old, new = make.hf_model(folder), make.hf_with(folder, changed)
    engine = make.make_engine(folder)
    for prompt, result in mixed(swap_in_flight(engine, changed, KvMode.RECOMPUTE)):
        split = split_of(result)
        recorded = torch.tensor(result.logprobs)
        before = make.reference_logprobs(old, prompt, result.token_ids)
        after = make.reference_logprobs(new, prompt, result.token_ids)
        assert (recorded[:split] - before[:split]).abs().max() < TOLERANCE
        assert (recorded[split:] - after[split:]).abs().max() < TOLERANCE
        assert (before - after).abs().max() > 0.1  # the two versions can be told apart
    engine.close()


@torch.no_grad()
def replayed_over_kept_cache(
    old: torch.nn.Module, new: torch.nn.Module, prompt: list[int], completion: list[int], split: int
) -> torch.Tensor:
    """Logprobs when `new` goes on over the keys and values that `old` computed up to the swap."""
    fed = prompt + completion[:-1]
    turn = len(prompt) + split - 1  # the first position that the new weights computed
    named = "cache" if "cache" in inspect.signature(old.forward).parameters else "past_key_values"
    kept = {named: DynamicCache(), "use_cache": True}
    first = old(torch.tensor([fed[:turn]]), **kept)
    rest = new(torch.tensor([fed[turn:]]), **kept)
    logits = torch.cat((first.logits[0, len(prompt) - 1 :], rest.logits[0])).double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("routed", [False, True])
def test_keep_equals_replay_of_each_span_over_the_kept_cache(tmp_path: Path, routed: bool) -> None:
    folder = make.endless_model_folder(tmp_path / "m", routed=routed)
    changed = make.perturbed(read_checkpoint(folder), seed=1)
    old, new = make.hf_model(folder), make.hf_with(folder, changed)
    engine = make.make_engine(folder)
    for prompt, result in mixed(swap_in_flight(engine, changed, KvMode.KEEP)):
        split = split_of(result)
        recorded = torch.tensor(result.logprobs)
        wanted = replayed_over_kept_cache(old, new, prompt, result.token_ids, split)
        assert (recorded - wanted).abs().max() < TOLERANCE
        plain = make.reference_logprobs(new, prompt, result.token_ids)
        assert (recorded[split:] - plain[split:]).abs().max() > 10 * TOLERANCE  # the old cache is really in use
    engine.close()


def test_swap_of_a_few_tensors_equals_a_fresh_engine(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m", routed=True)
    changed = make.perturbed(read_checkpoint(folder), seed=3, share=0.2)
    assert 1 < len(changed) < len(read_checkpoint(folder)) / 3
    engine = make.make_engine(folder)
    before = engine._scheduler(None).weights
    engine.commit(engine.stage(changed), version=V2)
    after = engine._scheduler(None).weights
    assert after.head is before.head or "lm_head.weight" in changed
    untouched = [name for name in before.tensors if name not in changed]
    assert all(after.tensors[name] is before.tensors[name] for name in untouched)
    result = make.generate(engine, make.random_prompt(12, seed=1), max_tokens=20)
    wanted = make.reference_logprobs(make.hf_with(folder, changed), make.random_prompt(12, seed=1), result.token_ids)
    assert (torch.tensor(result.logprobs) - wanted).abs().max() < TOLERANCE
    engine.close()


def test_staged_weights_are_copies(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m")
    changed = make.perturbed(read_checkpoint(folder), seed=3)
    engine = make.make_engine(folder)
    staged = engine.stage(changed)
    wanted = {name: tensor.clone() for name, tensor in changed.items()}
    for tensor in changed.values():
        tensor.zero_()  # as the next reconcile does with the shadow's tensors
    engine.commit(staged, version=V2)
    assert all(torch.equal(engine.tensors()[name], tensor) for name, tensor in wanted.items())
    engine.close()


def test_stage_refuses_what_does_not_fit(tmp_path: Path) -> None:
    engine = make.make_engine(make.make_model_folder(tmp_path / "m"))
    with pytest.raises(ModelError, match="lacks"):
        engine.stage({"model.layers.9.input_layernorm.weight": torch.ones(48)})
    with pytest.raises(ModelError, match="shape"):
        engine.stage({"model.norm.weight": torch.ones(7)})
    engine.close()


def test_swap_lets_requests_for_the_old_version_finish_and_takes_no_more(tmp_path: Path) -> None:
    folder = make.endless_model_folder(tmp_path / "m", routed=False)
    engine = make.make_engine(folder)
    engine.relabel(V1)
    gate = make.Gate(10)
    exact = make.submit(engine, [1, 2, 3], max_tokens=200, exact_version=V1, on_token=gate)
    least = make.submit(engine, [1, 2, 3], max_tokens=240, min_version=V1)
    assert gate.reached.wait(60)
    staged = engine.stage(make.perturbed(engine.tensors(), seed=1))
    with ThreadPoolExecutor(1) as pool:
        committed = pool.submit(engine.commit, staged, version=V2)
        make.wait_until(lambda: bool(engine._scheduler(None)._commands))
        with pytest.raises(VersionUnavailable, match=f"serves {V1} and then {V2}"):
            make.submit(engine, [1], exact_version=V1)
        gate.open.set()
        assert committed.result(60) < 60
    assert exact.future.result(60).spans == [VersionSpan(0, 200, str(V1))]
    assert [span.version for span in least.future.result(60).spans] == [str(V1), str(V2)]
    assert make.generate(engine, [1], max_tokens=2, exact_version=V2).spans == [VersionSpan(0, 2, str(V2))]
    engine.close()


def test_swap_fails_requests_that_want_the_old_version_for_too_long(tmp_path: Path) -> None:
    folder = make.endless_model_folder(tmp_path / "m", routed=False)
    engine = make.make_engine(folder, drain_s=0.0)
    engine.relabel(V1)
    exact = make.submit(engine, [1, 2, 3], max_tokens=200, exact_version=V1)
    least = make.submit(engine, [1, 2, 3], max_tokens=200, min_version=V1)
    make.wait_until(lambda: exact.sampled > 3 and least.sampled > 3)
    engine.commit(engine.stage(make.perturbed(engine.tensors(), seed=1)), version=V2)
    with pytest.raises(VersionUnavailable):
        exact.future.result(60)
    assert len(least.future.result(60).token_ids) == 200
    with pytest.raises(VersionUnavailable):
        make.submit(engine, [1], exact_version=V1)
    with pytest.raises(VersionUnavailable):
        make.submit(engine, [1], min_version=VersionRef("other", 0, 1))
    assert make.generate(engine, [1], max_tokens=2, exact_version=V2).spans == [VersionSpan(0, 2, str(V2))]
    engine.close()


def record_routes(model: torch.nn.Module) -> list[torch.Tensor]:
    """Experts that each layer of a transformers model chooses from now on, `[T, K]` per layer and forward."""
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    return chosen


@pytest.mark.parametrize("kv", list(KvMode))
def test_routes_are_those_behind_the_recorded_logprobs(tmp_path: Path, kv: KvMode) -> None:
    """What was routed before the swap stays recorded as it was, also when its keys are computed again."""
    folder = make.endless_model_folder(tmp_path / "m", routed=True)
    changed = make.perturbed(read_checkpoint(folder), seed=1)
    old, new = make.hf_model(folder), make.hf_with(folder, changed)
    before, after = record_routes(old), record_routes(new)
    engine = make.make_engine(folder)
    for prompt, result in mixed(swap_in_flight(engine, changed, kv)):
        turn = len(prompt) + split_of(result) - 1
        before.clear()
        after.clear()
        if kv is KvMode.KEEP:
            replayed_over_kept_cache(old, new, prompt, result.token_ids, split_of(result))
            wanted = torch.cat((torch.stack(before, dim=1), torch.stack(after, dim=1)))
        else:
            fed = torch.tensor([prompt + result.token_ids[:-1]])
            old(fed)
            new(fed)
            wanted = torch.cat((torch.stack(before, dim=1)[:turn], torch.stack(after, dim=1)[turn:]))
        routes = result.routes
        assert routes is not None
        assert (routes.tokens, routes.layers, routes.top_k, routes.dtype) == (*wanted.shape, "uint8")
        assert routes.data == wanted.to(torch.uint8).numpy().tobytes()
    engine.close()


def test_rows_of_two_versions_are_no_prefix(tmp_path: Path) -> None:
    folder = make.endless_model_folder(tmp_path / "m")
    changed = make.perturbed(read_checkpoint(folder), seed=1)
    engine = make.make_engine(folder)
    prompt = make.random_prompt(30, seed=1)
    running = make.submit(engine, prompt, max_tokens=200)
    make.wait_until(lambda: running.sampled > 5)
    engine.commit(engine.stage(changed), version=V2, kv=KvMode.KEEP)
    beside = make.generate(engine, prompt, max_tokens=5)
    assert len(running.future.result(60).token_ids) == 200
    behind = make.generate(engine, [*prompt, *running.future.result().token_ids[:20]], max_tokens=5)
    assert (beside.cached_tokens, behind.cached_tokens) == (0, 30)
    wanted = make.reference_logprobs(make.hf_with(folder, changed), prompt, beside.token_ids)
    assert (torch.tensor(beside.logprobs) - wanted).abs().max() < TOLERANCE
    engine.close()


def test_slots_serve_different_weights_and_share_the_rest(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m")
    engine = make.make_engine(folder, slots=("promoted", "candidate"))
    changed = make.perturbed(engine.tensors(), seed=4, share=0.3)
    engine.commit(engine.stage(changed, slot="candidate"), version=V2)
    assert engine.version("promoted") is None
    assert engine.version("candidate") == V2
    shared = [n for n in engine.tensors("promoted") if engine.tensors("promoted")[n] is engine.tensors("candidate")[n]]
    assert set(shared) == set(engine.tensors()) - set(changed)
    prompt = make.random_prompt(10, seed=1)
    for slot, model in (("promoted", make.hf_model(folder)), ("candidate", make.hf_with(folder, changed))):
        result = make.generate(engine, prompt, slot=slot, max_tokens=10, seed=1)
        wanted = make.reference_logprobs(model, prompt, result.token_ids)
        assert (torch.tensor(result.logprobs) - wanted).abs().max() < TOLERANCE
    engine.close()


@torch.no_grad()
def test_routes_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make.make_model_folder(tmp_path / "m", routed=True)
    engine = make.make_engine(folder)
    model = make.hf_model(folder)
    chosen = record_routes(model)
    shared = make.random_prompt(40, seed=8)
    make.generate(engine, shared, max_tokens=3)  # so that the second prompt's routes come from a reused prefix
    prompt = [*shared, 1, 2, 3]
    result = make.generate(engine, prompt, max_tokens=30, routes=True)
    assert result.cached_tokens == len(shared)
    model(torch.tensor([prompt + result.token_ids[:-1]]))
    wanted = torch.stack(chosen, dim=1)
    assert result.routes is not None
    assert result.routes.data == wanted.to(torch.uint8).numpy().tobytes()
    engine.close()
