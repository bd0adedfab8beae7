"""The embedded engine against `transformers.generate`: tokens per CPU second, logprobs, and what a swap costs.

SmolLM2-135M-Instruct, one thread, both sides in the same compute dtype in the same process, taking turns. Independent
prompts of 64 tokens, 48 new (32 and 12 when quick), temperature 1; `group` is one prompt with a sample per batch place,
which `generate` prefills once a sample. The engine is measured through its scheduler, without HTTP, and records
a logprob per token; `generate` records none. `swap_steps` is the longest gap between two tokens of a running batch
while all weights are staged and flipped, in median decode steps.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.measure import Progress, interleaved_medians, rounds
from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine, Staged
from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.request import Request, TextCodec
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.types import SamplingParams, VersionRef

MODEL = Path("var/models/smollm2-135m-instruct")
BATCHES = (1, 8, 32)
SWAP_BATCH = 16
_VLLM_KEYS = [*(f"vs_vllm_b{batch}" for batch in BATCHES), "group_vs_vllm_b32"]


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Flat results: ratios of tokens per CPU second (ours ÷ theirs), absolute rates, logprob errors, swap cost."""
    torch.set_num_threads(1)
    codec = _Endless(ChatTokenizer.load(MODEL))
    progress("loading the engine and its peer")
    engine = _engine(codec, ComputeDtype.AUTO)
    peer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=engine.dtype).eval()
    result: dict[str, object] = {"dtype": str(engine.dtype).removeprefix("torch.")}
    for batch in BATCHES:
        result |= _against_hf(engine, peer, batch=batch, group=False, quick=quick, progress=progress)
    result |= _against_hf(engine, peer, batch=BATCHES[-1], group=True, quick=quick, progress=progress)
    progress("swapping under load")
    result |= _swap(engine, quick=quick)
    engine.close()
    reference = peer.float()
    for dtype in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16):
        progress(f"comparing logprobs computed in {dtype}")
        name = "fp32" if dtype is ComputeDtype.FLOAT32 else "bf16"
        result[f"logprob_mae_{name}"] = _logprob_error(codec, reference, dtype, quick=quick)
    # A comparison with vLLM needs a process of its own with another torch build: `make bench-peers` sets it up.
    found = importlib.util.find_spec("vllm") is not None
    result["missing"] = [] if found else ["vllm"]
    result["left_out"] = _VLLM_KEYS
    return result


class _Endless:
    """A tokenizer without end tokens, so that every sample is as long as the peer's."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, codec: ChatTokenizer) -> None:
        self.token_strings = codec.token_strings
        self.decode = codec.decode


def _engine(codec: TextCodec, dtype: ComputeDtype) -> Engine:
    # No finished row is retained: what one round computed must not help the next.
    limits = SchedulerLimits(max_seqs=max(BATCHES), max_len=512, retained=0)
    return Engine.load(MODEL, codec=codec, limits=limits, dtype=dtype)


def _prompts(count: int, *, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(100, 40_000, (count, length), generator=generator).tolist()
    return rows


def _against_hf(
    engine: Engine, peer: torch.nn.Module, *, batch: int, group: bool, quick: bool, progress: Progress
) -> dict[str, object]:
    length, new = (32, 12) if quick else (64, 48)
    calls = 4 if batch == 1 else 1
    prompts = _prompts(1 if group else batch, length=length, seed=batch)
    prompts = prompts * batch if group else prompts
    name = f"{'group_' if group else ''}vs_hf_b{batch}"
    progress(f"{name}: {batch} × {length} + {new} tokens")
    candidates = {
        "ours": _repeated(partial(_generate_ours, engine, prompts, new), calls),
        "hf": _repeated(partial(_generate_hf, peer, prompts, new), calls),
    }
    seconds = interleaved_medians(candidates, repeats=rounds(quick=quick), clock=time.process_time, warmup=not quick)
    tokens = batch * new * calls
    label = name.replace("vs_hf_", "")
    return {
        name: seconds["hf"] / seconds["ours"],
        f"{label}_tokens_per_cpu_s": tokens / seconds["ours"],
        f"{label}_hf_tokens_per_cpu_s": tokens / seconds["hf"],
    }


def _repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


def _generate_ours(engine: Engine, prompts: list[list[int]], new: int) -> None:
    params = SamplingParams(max_tokens=new)
    sequences = [engine.submit(Request(prompt=prompt, sampling=params)) for prompt in prompts]
    for sequence in sequences:
        assert len(sequence.future.result().token_ids) == new


@torch.inference_mode()
def _generate_hf(peer: torch.nn.Module, prompts: list[list[int]], new: int) -> None:
    ids = torch.tensor(prompts)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    generate: Callable[..., Tensor] = peer.generate  # type: ignore[assignment]
    generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options)


def _swap(engine: Engine, *, quick: bool) -> dict[str, object]:
    """Longest gap between two tokens of a batch in flight while every tensor is staged and flipped."""
    ratios, stages, flips = [], [], []
    for attempt in range(rounds(quick=quick)):
        gaps, staged, flip_s = _swap_once(engine, seed=attempt)
        ratios.append(max(gaps) / statistics.median(gaps))
        stages.append(staged.stage_s)
        flips.append(flip_s)
    return {
        "swap_steps": statistics.median(ratios),
        "swap_stage_s": statistics.median(stages),
        "swap_flip_ms": 1000 * statistics.median(flips),
    }


def _swap_once(engine: Engine, *, seed: int) -> tuple[list[float], Staged, float]:
    """Seconds between the tokens of one sequence of a batch, from before staging until after the flip."""
    times: list[float] = []
    sequences = [
        engine.submit(
            Request(prompt=prompt, sampling=SamplingParams(max_tokens=400)),
            on_token=lambda _: times.append(time.perf_counter()),
        )
        for prompt in _prompts(1, length=16, seed=seed) * SWAP_BATCH
    ]
    _wait_for(times, SWAP_BATCH * 6)
    staged = engine.stage(dict(engine.tensors()))
    flip_s = engine.commit(staged, version=VersionRef("bench", 0, seed))
    _wait_for(times, len(times) + SWAP_BATCH * 3)
    for sequence in sequences:
        engine.abort(sequence)
    for sequence in sequences:
        sequence.future.result()
    # The tokens of one step are told within a moment of each other: what lies between steps is the gap.
    between = [after - before for before, after in pairwise(times)]
    return [gap for gap in between if gap > 0.002][SWAP_BATCH // 8 :], staged, flip_s


def _wait_for(times: list[float], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(times) < count and time.monotonic() < deadline:
        time.sleep(0.005)


@torch.inference_mode()
def _logprob_error(codec: TextCodec, reference: torch.nn.Module, dtype: ComputeDtype, *, quick: bool) -> float:
    """Mean absolute difference of sampled tokens' logprobs from a plain fp32 forward of transformers."""
    engine = _engine(codec, dtype)
    prompts = _prompts(2 if quick else 8, length=24, seed=7)
    sampling = [SamplingParams(max_tokens=8 if quick else 24, seed=index) for index in range(len(prompts))]
    sequences = [
        engine.submit(Request(prompt=prompt, sampling=params)) for prompt, params in zip(prompts, sampling, strict=True)
    ]
    errors: list[Tensor] = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        result = sequence.future.result()
        logits = reference(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        errors.append((wanted - torch.tensor(result.logprobs, dtype=torch.float64)).abs())
    engine.close()
    return float(torch.cat(errors).mean())
