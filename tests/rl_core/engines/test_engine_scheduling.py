"""Batching, prefix reuse, stops, aborts, queues and pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import engine_factories as make
import pytest
import torch

from rl_core.engines.engine import Engine
from rl_core.engines.request import ActiveSequence
from rl_core.engines.waiting import Waiting
from rl_core.errors import EngineBusy, EngineError, RequestRefused
from rl_core.types import FinishReason, PauseMode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.endless_model_folder(tmp_path_factory.mktemp("models") / "m")


def test_a_seed_draws_the_same_alone_and_in_a_crowd(folder: Path) -> None:
    prompt = make.random_prompt(15, seed=1)
    with_one = make.make_engine(folder)
    alone = make.generate(with_one, prompt, max_tokens=40, seed=7)
    other = make.generate(with_one, prompt, max_tokens=40, seed=8)
    with_one.close()
    crowded = make.make_engine(folder)
    crowd = [make.submit(crowded, make.random_prompt(5 + i, seed=i), max_tokens=60) for i in range(12)]
    together = make.generate(crowded, prompt, max_tokens=40, seed=7)
    assert together.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids
    for sequence in crowd:
        sequence.future.result(60)
    crowded.close()


def test_tokens_follow_the_distribution(folder: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(8, seed=3)
    draws = [make.submit(engine, prompt, max_tokens=1, temperature=0.5, seed=i) for i in range(200)]
    counts = torch.bincount(torch.tensor([d.future.result(60).token_ids[0] for d in draws]), minlength=259)
    with torch.no_grad():
        logits = make.hf_model(folder)(torch.tensor([prompt])).logits[0, -1].double()
    probabilities = torch.softmax(logits / 0.5, -1)
    likely = probabilities > 0.02
    assert likely.sum() >= 3
    expected, seen = 200 * probabilities[likely], counts[likely]
    spread = (200 * probabilities[likely] * (1 - probabilities[likely])).sqrt()
    assert ((seen - expected).abs() < 4 * spread).all()
    engine.close()


def test_identical_prompts_together_are_prefilled_once(folder: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(50, seed=1)
    group = [make.submit(engine, prompt, max_tokens=12, seed=i) for i in range(8)]
    results = [sequence.future.result(60) for sequence in group]
    assert sorted(result.cached_tokens for result in results) == [0] + [49] * 7
    model = make.hf_model(folder)
    for result in results:
        wanted = make.reference_logprobs(model, prompt, result.token_ids)
        assert (torch.tensor(result.logprobs) - wanted).abs().max() < 1e-4
    assert len({tuple(result.token_ids) for result in results}) == 8
    engine.close()


def test_a_second_turn_reuses_the_first(folder: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(30, seed=1)
    first = make.generate(engine, prompt, max_tokens=20)
    second_prompt = prompt + first.token_ids + make.random_prompt(9, seed=2)
    second = make.generate(engine, second_prompt, max_tokens=10)
    assert second.cached_tokens == 30 + len(first.token_ids) - 1
    wanted = make.reference_logprobs(make.hf_model(folder), second_prompt, second.token_ids)
    assert (torch.tensor(second.logprobs) - wanted).abs().max() < 1e-4
    # The first turn's row is a prefix of the second's and made way for it.
    assert engine.snapshot()["default"]["kv_rows_used"] == 1
    engine.close()


def test_prefixes_are_dropped_at_a_swap_but_not_at_a_new_name(folder: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(30, seed=1)
    make.generate(engine, prompt, max_tokens=2)
    engine.relabel(None)
    assert make.generate(engine, prompt, max_tokens=2).cached_tokens == 29
    engine.commit(engine.stage(make.perturbed(engine.tensors(), seed=1)), version=None)
    assert make.generate(engine, prompt, max_tokens=2).cached_tokens == 0
    engine.close()


def test_retained_rows_leave_least_recently_used_first(folder: Path) -> None:
    engine = make.make_engine(folder, retained=2)
    prompts = [[seed] * 20 for seed in range(3)]
    make.generate(engine, prompts[0], max_tokens=2)
    make.generate(engine, prompts[1], max_tokens=2)
    make.generate(engine, [*prompts[0], 5], max_tokens=2)  # uses the first again
    make.generate(engine, prompts[2], max_tokens=2)
    assert make.generate(engine, [*prompts[1], 7], max_tokens=1).cached_tokens == 0
    assert make.generate(engine, [*prompts[0], 7], max_tokens=1).cached_tokens == 20
    engine.close()


def ascii_stop(engine: Engine, prompt: list[int]) -> tuple[str, int]:
    """Two printable neighbours in the greedy completion: a stop string, and how many tokens end with it."""
    tokens = make.generate(engine, prompt, temperature=0, max_tokens=100).token_ids
    strings = engine.codec.token_strings
    for place in range(3, len(tokens)):
        pair = strings[tokens[place - 1]] + strings[tokens[place]]
        text = "".join(strings[token] for token in tokens[: place + 1])
        if pair.isascii() and len(pair) == 2 and text.index(pair) == len(text) - 2:
            return pair, place + 1
    raise AssertionError("the completion holds no printable pair; choose another seed")


def test_stop_strings_end_a_completion(folder: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(8, seed=11)
    stop, count = ascii_stop(engine, prompt)
    result = make.generate(engine, prompt, temperature=0, max_tokens=100, stop=("never there", stop))
    assert result.finish_reason is FinishReason.STOP
    assert len(result.token_ids) == count
    assert result.text.endswith(stop)
    assert make.generate(engine, prompt, temperature=0, max_tokens=count - 1, stop=(stop,)).finish_reason == "length"
    engine.close()


def test_an_end_token_ends_a_completion_and_is_part_of_it(folder: Path, tmp_path: Path) -> None:
    engine = make.make_engine(folder)
    prompt = make.random_prompt(8, seed=11)
    tokens = make.generate(engine, prompt, temperature=0, max_tokens=60).token_ids
    place = next(i for i in range(4, 60) if tokens[i] not in tokens[:i])
    engine.close()
    other = make.make_model_folder(tmp_path / "m", eos_token_id=tokens[place])
    (other / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    engine = make.make_engine(other)
    result = make.generate(engine, prompt, temperature=0, max_tokens=60)
    assert (result.finish_reason, result.token_ids) == (FinishReason.STOP, tokens[: place + 1])
    engine.close()


def test_the_length_of_the_window_ends_a_completion(tmp_path: Path) -> None:
    engine = make.make_engine(make.endless_model_folder(tmp_path / "m"), max_len=32)
    result = make.generate(engine, make.random_prompt(20, seed=1), max_tokens=500)
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 12
    engine.close()


@pytest.mark.parametrize("prompt", [[], [259], [-1], [1] * 256])
def test_prompts_that_cannot_be_read_are_refused(folder: Path, prompt: list[int]) -> None:
    engine = make.make_engine(folder)
    with pytest.raises(RequestRefused):
        make.submit(engine, prompt)
    engine.close()


def test_abort_ends_running_and_waiting_requests(folder: Path) -> None:
    engine = make.make_engine(folder, max_seqs=1)
    running = make.submit(engine, [1, 2, 3], max_tokens=240)
    waiting = make.submit(engine, [4, 5, 6], max_tokens=240)
    make.wait_until(lambda: running.sampled > 3)
    engine.abort(waiting)
    engine.abort(running)
    ended = running.future.result(60)
    assert ended.finish_reason is FinishReason.ABORT
    assert 3 < len(ended.token_ids) < 240
    assert waiting.future.result(60).token_ids == []
    assert engine.snapshot()["default"]["aborted_total"] == 2
    assert make.generate(engine, [7], max_tokens=2).finish_reason is FinishReason.LENGTH
    engine.close()


def test_a_full_queue_sends_callers_away(folder: Path) -> None:
    engine = make.make_engine(folder, max_seqs=1, max_waiting=2)
    engine.pause(PauseMode.KEEP)
    queued = [make.submit(engine, [1], max_tokens=1) for _ in range(2)]
    with pytest.raises(EngineBusy):
        make.submit(engine, [1], max_tokens=1)
    engine.resume()
    assert all(len(sequence.future.result(60).token_ids) == 1 for sequence in queued)
    engine.close()


def test_pause_keep_freezes_and_resume_goes_on(folder: Path) -> None:
    reference = make.make_engine(folder)
    wanted = make.generate(reference, [1, 2, 3], max_tokens=150, seed=1)
    reference.close()
    engine = make.make_engine(folder)
    sequence = make.submit(engine, [1, 2, 3], max_tokens=150, seed=1)
    make.wait_until(lambda: sequence.sampled > 3)
    engine.pause(PauseMode.KEEP)
    frozen = sequence.sampled
    threading.Event().wait(0.1)
    assert sequence.sampled == frozen < 150
    engine.resume()
    assert sequence.future.result(60).token_ids == wanted.token_ids
    engine.close()


def test_pause_wait_finishes_what_runs_and_admits_nothing(folder: Path) -> None:
    engine = make.make_engine(folder, max_seqs=1)
    running = make.submit(engine, [1, 2, 3], max_tokens=100)
    waiting = make.submit(engine, [4], max_tokens=2)
    make.wait_until(lambda: running.sampled > 3)
    engine.pause(PauseMode.WAIT)
    assert running.future.done()
    assert running.future.result().finish_reason is not FinishReason.ABORT
    assert not waiting.future.done()
    engine.resume()
    assert len(waiting.future.result(60).token_ids) == 2
    engine.close()


def test_pause_abort_ends_everything(folder: Path) -> None:
    engine = make.make_engine(folder, max_seqs=1)
    sequences = [make.submit(engine, [1, 2, 3], max_tokens=240) for _ in range(2)]
    make.wait_until(lambda: sequences[0].sampled > 3)
    engine.pause(PauseMode.ABORT)
    assert [sequence.future.result(30).finish_reason for sequence in sequences] == [FinishReason.ABORT] * 2
    engine.resume()
    assert len(make.generate(engine, [1], max_tokens=1).token_ids) == 1
    engine.close()


def test_close_answers_what_is_in_flight(folder: Path) -> None:
    engine = make.make_engine(folder, max_seqs=1)
    sequences = [make.submit(engine, [1, 2, 3], max_tokens=240) for _ in range(2)]
    engine.close()
    assert {sequence.future.result(30).finish_reason for sequence in sequences} == {FinishReason.ABORT}
    with pytest.raises(EngineError):
        make.submit(engine, [1])


def test_a_fault_fails_its_requests_and_spares_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make.make_engine(folder)
    batch = engine._scheduler(None)._batch
    decode = batch.decode

    def out_of_memory() -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(batch, "decode", out_of_memory)
    with pytest.raises(EngineError, match="not enough memory"):
        make.generate(engine, [1], max_tokens=2)
    monkeypatch.setattr(batch, "decode", decode)
    assert len(make.generate(engine, [1], max_tokens=2).token_ids) == 2
    assert engine.snapshot()["default"]["faults_total"] == 1
    engine.close()


def test_a_long_prompt_does_not_stop_the_others(folder: Path) -> None:
    engine = make.make_engine(folder, prefill_chunk=4)
    running = make.submit(engine, [1, 2, 3], max_tokens=200)
    make.wait_until(lambda: running.sampled > 3)
    before = running.sampled
    late = make.submit(engine, make.random_prompt(200, seed=1), max_tokens=1)
    late.future.result(60)
    assert running.sampled - before >= 40  # 200 tokens in chunks of 4, a decode step between any two
    engine.close()


def test_requests_may_come_while_the_queue_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(waiting: Waiting) -> Iterator[ActiveSequence]:
        for sequence in waiting._queue:
            time.sleep(0.001)
            yield sequence

    monkeypatch.setattr(Waiting, "__iter__", slowly)
    engine = make.make_engine(folder, max_seqs=1)
    sequences = [make.submit(engine, make.random_prompt(8, seed=n), max_tokens=4) for n in range(20)]
    assert [len(sequence.future.result(60).token_ids) for sequence in sequences] == [4] * 20
    engine.close()
