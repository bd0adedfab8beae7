"""One step of RL against TRL's GRPOTrainer and a plain transformers loop: the same prompts, group, tokens and model.

A step is generation, scoring (count of digits), training and the new weights in the engine, on one thread. Attempts
end when the model ends them, so costs are compared per completion token; candidates take turns, medians are compared.
`train_vs_hf_cpu` is the training part alone, on the very same sequences. The plain loop generates with `generate` and
trains on padded sequences with autograd and AdamW, as a first script would; it computes in the dtype that ours does.
`peak_mb` and `step_4x8_cpu_s` are of the trainer process on 4 prompts × 8 attempts of 230 + 50 tokens.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import rounds
from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import ComputeDtype as EngineDtype
from rl_core.engines.request import Request
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.models.parameters import ComputeDtype, pick_compute_dtype
from rl_core.specs import OptimizerSpec, RlStage
from rl_core.store import open_store
from rl_core.trainer.batch import TrainRollout
from rl_core.trainer.client import TrainerProcess
from rl_core.trainer.messages import Op
from rl_core.trainer.trainer import Trainer
from rl_core.types import SamplingParams, TokenSegment, Trajectory, VersionRef, VersionSpan

MODEL = Path("var/models/smollm2-135m-instruct")
PEERS = Path(".venv-peers/bin/python")
VERSION = VersionRef("bench", 0, 0)
LEARNING_RATE = 1e-6

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Work:
    """How much one step does."""

    prompts: int
    group: int
    tokens: int
    texts: list[str]

    def batch(self, step: int) -> list[str]:
        """The step's prompts."""
        start = step * self.prompts % (len(self.texts) - self.prompts)
        return self.texts[start : start + self.prompts]


@dataclass(slots=True)
class Costs:
    """What steps of one candidate cost."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    train_cpu_s: list[float] = field(default_factory=list)

    def add(self, spent: dict[str, Any]) -> None:
        """Take one step's figures."""
        self.cpu_s.append(spent["cpu_s"])
        self.wall_s.append(spent["wall_s"])
        self.tokens.append(spent["tokens"])
        self.train_cpu_s.append(spent.get("train_cpu_s", 0.0))

    def per_token(self, costs: list[float]) -> float:
        """Median cost of a completion token."""
        return statistics.median(cost / n for cost, n in zip(costs, self.tokens, strict=True))


def digit_share(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(1, len(text))


def as_rollout(
    number: int, group: str, prompt: list[int], own: list[int], logprobs: list[float], reward: float
) -> TrainRollout:
    n, m = len(prompt), len(own)
    segment = TokenSegment(
        token_ids=prompt + own,
        loss_mask=[0] * n + [1] * m,
        logprobs=[0.0] * n + logprobs,
        spans=[VersionSpan(n, n + m, str(VERSION))],
        sampling=SamplingParams(),
    )
    return TrainRollout(str(number), group, reward, Trajectory(task_id=group, messages=[], segments=[segment]))


class Ours:
    """The embedded engine and the trainer, in this process."""

    def __init__(self, work: Work, dtype: ComputeDtype) -> None:
        self.work = work
        engine_dtype = EngineDtype.BFLOAT16 if dtype is ComputeDtype.BF16 else EngineDtype.FLOAT32
        self.codec = ChatTokenizer.load(MODEL)
        limits = SchedulerLimits(max_seqs=work.prompts * work.group, max_len=256)
        self.engine = Engine.load(MODEL, codec=self.codec, limits=limits, dtype=engine_dtype)
        stage = RlStage(
            sampling=SamplingParams(max_tokens=work.tokens),
            max_turns=1,
            optimizer=OptimizerSpec(learning_rate=LEARNING_RATE),
        )
        self.trainer = Trainer(MODEL, stage=stage, seed=0, dtype=dtype)

    def step(self, number: int) -> tuple[dict[str, Any], list[TrainRollout]]:
        """One step; what it cost, and what was trained on."""
        cpu, wall = time.process_time(), time.perf_counter()
        sampling = SamplingParams(max_tokens=self.work.tokens)
        waiting = []
        for group, text in enumerate(self.work.batch(number)):
            prompt = self.codec.encode(text)
            for _ in range(self.work.group):
                waiting.append((str(group), prompt, self.engine.submit(Request(prompt=prompt, sampling=sampling))))
        rollouts = []
        for i, (group_name, prompt, sequence) in enumerate(waiting):
            got = sequence.future.result(timeout=600)
            rollouts.append(as_rollout(i, group_name, prompt, got.token_ids, got.logprobs, digit_share(got.text)))
        train = time.process_time()
        self.trainer.step(rollouts)
        self.trainer.mark_published()
        trained = time.process_time() - train
        self.engine.commit(self.engine.stage(self.trainer.weights()), version=VERSION)
        spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "train_cpu_s": trained}
        return spent | {"tokens": sum(r.trajectory.sampled_tokens() for r in rollouts)}, rollouts

    def close(self) -> None:
        """End the engine's threads."""
        self.engine.close()


class PlainLoop:
    """What a first script does with transformers."""

    def __init__(self, work: Work, dtype: ComputeDtype) -> None:
        self.work = work
        self.tokenizer = AutoTokenizer.from_pretrained(str(MODEL), padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=dtype.torch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.pad = self.tokenizer.pad_token_id

    def step(self, number: int) -> dict[str, Any]:
        """One step; what it cost."""
        cpu, wall = time.process_time(), time.perf_counter()
        texts = [text for text in self.work.batch(number) for _ in range(self.work.group)]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        length = inputs.input_ids.shape[1]
        with torch.no_grad():
            out = self.model.generate(**inputs, max_new_tokens=self.work.tokens, do_sample=True, top_k=0)
        own = out[:, length:]
        ended = (own == self.tokenizer.eos_token_id).cumsum(1)
        mask = (ended - (own == self.tokenizer.eos_token_id).long()) == 0
        rewards = torch.tensor([digit_share(t) for t in self.tokenizer.batch_decode(own, skip_special_tokens=True)])
        attention = torch.cat((inputs.attention_mask, mask.long()), dim=1)
        self.train(out, attention, torch.cat((torch.zeros_like(inputs.input_ids), mask.long()), dim=1), rewards)
        spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
        return spent | {"tokens": int(mask.sum())}

    def train(self, ids: torch.Tensor, attention: torch.Tensor, loss_mask: torch.Tensor, rewards: torch.Tensor) -> None:
        """One Dr. GRPO step on padded sequences. Shapes: [B, T] each, rewards [B]."""
        groups = rewards.view(-1, self.work.group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = self.model(ids, attention_mask=attention, position_ids=positions).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(logprobs * loss_mask[:, 1:] * advantages[:, None]).sum() / (len(ids) * self.work.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train_on(self, rollouts: list[TrainRollout]) -> float:
        """CPU seconds of a step on given rollouts."""
        segments = [rollout.trajectory.segments[0] for rollout in rollouts]
        width = max(len(segment.token_ids) for segment in segments)
        shape = (len(segments), width)
        ids, attention, mask = torch.full(shape, self.pad), torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
        for row, segment in enumerate(segments):
            n = len(segment.token_ids)
            ids[row, :n] = torch.tensor(segment.token_ids)
            attention[row, :n] = 1
            mask[row, :n] = torch.tensor(segment.loss_mask)
        started = time.process_time()
        self.train(ids, attention.long(), mask, torch.tensor([rollout.reward for rollout in rollouts]))
        return time.process_time() - started


class Trl:
    """TRL in its own environment and process, stepped by lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, work: Work, *, python: Path, steps: int, dtype: str) -> Iterator[Trl]:
        """Start and wait until it is ready."""
        script = Path(__file__).parent / "peers" / "trl_grpo.py"
        with tempfile.TemporaryDirectory() as scratch:
            prompts = Path(scratch) / "prompts.json"
            prompts.write_text(json.dumps(work.texts))
            command = [
                str(python), str(script), str(MODEL), "--prompts", str(prompts), "--steps", str(steps),
                "--tokens", str(work.tokens), "--batch", str(work.prompts * work.group),
                "--group", str(work.group), "--dtype", dtype,
            ]  # fmt: skip
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
            )
            try:
                peer = cls(process)
                peer._read()
                yield peer
            finally:
                process.kill()
                process.wait()

    def _read(self) -> dict[str, Any]:
        out: IO[str] | None = self._process.stdout
        line = out.readline() if out is not None else ""
        if not line:
            raise RuntimeError("the TRL process ended; see its messages above")
        data: dict[str, Any] = json.loads(line)
        return data

    def step(self) -> dict[str, Any]:
        """One step; what it cost."""
        if self._process.stdin is None:
            raise RuntimeError("the TRL process has no standard input")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """The keys of the form, and the absolute figures behind them."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    texts = [f"Compute and answer with digits only: {rng.randrange(97)} + {rng.randrange(89)} =" for _ in range(200)]
    work = Work(prompts=2, group=4 if quick else 8, tokens=24 if quick else 48, texts=texts)
    dtype = pick_compute_dtype()
    result: dict[str, object] = {"compute_dtype": str(dtype), "missing": []}
    result |= _trainer_process(progress, quick=quick)
    found = PEERS.is_file() and not quick
    if not found:
        result["missing"] = ["trl" if not PEERS.is_file() else "trl (left out by --quick)"]
    kinds = [dtype] if dtype is ComputeDtype.FP32 or quick else [dtype, ComputeDtype.FP32]
    for kind in kinds:
        result |= _compare(work, kind, quick=quick, with_trl=found, progress=progress, default=kind is dtype)
    return result


def _compare(
    work: Work, dtype: ComputeDtype, *, quick: bool, with_trl: bool, progress: Progress, default: bool
) -> dict[str, object]:
    repeats = rounds(quick=quick)
    ours, plain = Ours(work, dtype), PlainLoop(work, dtype)
    mine, theirs, trl = Costs(), Costs(), Costs()
    plain_train: list[float] = []
    with _maybe_trl(work, dtype, steps=repeats + 1, enabled=with_trl) as peer:
        for number in range(repeats + 1):  # the first round warms up
            progress(f"{dtype}: round {number} of {repeats}: ours, plain transformers{', TRL' if peer else ''}")
            spent, rollouts = ours.step(number)
            loop, train = plain.step(number), plain.train_on(rollouts)
            other = peer.step() if peer else None
            if number:
                mine.add(spent)
                theirs.add(loop)
                plain_train.append(train)
                if other is not None:
                    trl.add(other)
    ours.close()
    figures: dict[str, object] = {}
    if default:
        figures = {
            "vs_hf_cpu": theirs.per_token(theirs.cpu_s) / mine.per_token(mine.cpu_s),
            "train_vs_hf_cpu": statistics.median(plain_train) / statistics.median(mine.train_cpu_s),
            "step_cpu_s": statistics.median(mine.cpu_s),
            "step_wall_s": statistics.median(mine.wall_s),
        }
    if with_trl:
        figures |= _trl_figures(mine, trl, dtype, default=default)
    return figures


def _trl_figures(mine: Costs, trl: Costs, dtype: ComputeDtype, *, default: bool) -> dict[str, object]:
    """TRL runs in fp32, its default; the key says what ours computes in."""
    ratio = trl.per_token(trl.cpu_s) / mine.per_token(mine.cpu_s)
    figures: dict[str, object] = {"vs_trl_cpu" if dtype is ComputeDtype.BF16 else "vs_trl_cpu_fp32": ratio}
    if default:
        figures["vs_trl_wall"] = trl.per_token(trl.wall_s) / mine.per_token(mine.wall_s)
        figures["trl_step_cpu_s"] = statistics.median(trl.cpu_s)
    return figures


@contextmanager
def _maybe_trl(work: Work, dtype: ComputeDtype, *, steps: int, enabled: bool) -> Iterator[Trl | None]:
    if not enabled:
        yield None
        return
    with Trl.start(work, python=PEERS, steps=steps, dtype="float32") as peer:
        yield peer


def _trainer_process(progress: Progress, *, quick: bool) -> dict[str, object]:
    """The trainer process on a step of the demonstration's size: its peak and its cost, publishing included."""
    progress("the trainer process on 4 prompts × 8 attempts of 230 + 50 tokens")
    rng = random.Random(0)
    example = [rng.randrange(1000, 40000) for _ in range(190)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        TrainerProcess.start(threads=1, stderr=subprocess.DEVNULL) as process,
    ):
        store = open_store(Path(scratch).as_uri())
        refs = []
        for number in range(32):
            if number % 8 == 0:
                prompt = example + [rng.randrange(1000, 40000) for _ in range(40)]
            own = [rng.randrange(1000, 40000) for _ in range(50)]
            rollout = as_rollout(number, str(number // 8), prompt, own, [-10.0] * 50, rng.random())
            store.put(f"r/{number}", rollout.trajectory.to_bytes())
            refs.append({"id": str(number), "group": rollout.group, "reward": rollout.reward, "blob": f"r/{number}"})
        opened = process.call(
            Op.OPEN, run="bench", model_dir=str(MODEL), store_url=store.url, checkpoint_root=os.path.join(scratch, "c"),
            stage=msgspec.to_builtins(RlStage()), seed=0, lineage="bench",
        )  # fmt: skip
        result = process.call(
            Op.STEP, step=1, fence=1, version="bench:0-1", rollouts=refs,
            base={"version": str(VERSION), "root": opened["root"]}, publish=not quick,
        )  # fmt: skip
    return {
        "peak_mb": result["peak_mb"],
        "step_4x8_cpu_s": result["metrics"]["cpu_seconds"],
        "step_4x8_computed_share": result["metrics"]["computed_tokens"] / result["metrics"]["sequence_tokens"],
    }
