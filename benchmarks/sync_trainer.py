"""The trainer's side of the `sync` benchmark, a process of its own: makes versions and publishes them when it is told.

Versions alternate between the two of a real pair, so that each differs from the one before as a training step's does.
In each, one token's row of the (tied) embedding points where the model's hidden states do, so that this version samples
that token and no other: every token tells by itself which version it is of.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import structlog
import torch
from safetensors.torch import save_file

from benchmarks.delta_pairs import MODEL, Weights, real_pair
from rl_core.delta import Base, publish_delta, weights_root
from rl_core.delta.codec import Profile
from rl_core.models.checkpoint import write_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef

LEARNING_RATE = 3e-6  # about one weight in a hundred changes
EMBEDDING = "model.embed_tokens.weight"
_FIRST_MARK = 1000  # an ordinary token, as those after it are
_LOGIT = 240.0  # what the marked token's logit is on average; others stay below 30


def mark_of(number: int) -> int:
    """The token that version `number` samples."""
    return _FIRST_MARK + number


class Trainer:
    """Holds the pair and what was published last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = open_store(folder / "store")
        self._pair = real_pair(LEARNING_RATE, progress=lambda message: print(message, file=sys.stderr))
        self._direction = _mean_hidden_state()
        self._published: tuple[int, str, str | None]
        self._at = 0
        self._last: Weights = {}
        self._next: Weights = {}

    def start(self) -> dict[str, object]:
        """Write version 0 as a model folder for the engines."""
        self._last = self._version(0, self._pair[0])
        write_checkpoint(self._folder / "model", self._last, like=MODEL)
        self._published = (0, weights_root(self._last), None)
        return {"bytes": sum(tensor.nbytes for tensor in self._last.values())}

    def prepare(self, number: int) -> dict[str, object]:
        """Make the weights of a version: the optimiser's work, before the clock runs."""
        self._next = self._version(number, self._pair[1 - self._at])
        return {}

    def delta(self, number: int) -> dict[str, object]:
        """Publish what was prepared as a delta from the one before it."""
        base, root, key = self._published
        published = publish_delta(
            self._store, old=self._last, new=self._next, version=VersionRef("bench", 0, number),
            base=Base(f"bench:0-{base}", root, key), fence=0, verify_base=False,
            profile=Profile.FAST, threads=2,
        )  # fmt: skip
        self._published = (number, published.root, published.manifest_key)
        self._last, self._at = self._next, 1 - self._at
        return {"root": published.root, "key": published.manifest_key, "bytes": published.bytes}

    def full(self, number: int) -> dict[str, object]:
        """Publish what was prepared as a whole safetensors checkpoint, as durably as the store does."""
        root = weights_root(self._next, threads=2)
        path = self._folder / "store" / f"full/{number}.safetensors"
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(self._next, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
        for old in path.parent.glob("*.safetensors"):
            if old != path:
                old.unlink()
        return {"root": root, "key": str(path.relative_to(self._folder / "store")), "bytes": path.stat().st_size}

    def _version(self, number: int, weights: Weights) -> Weights:
        weights = dict(weights)
        weights[EMBEDDING] = weights[EMBEDDING].clone()
        weights[EMBEDDING][mark_of(number)] = self._direction
        return weights


def _mean_hidden_state() -> torch.Tensor:
    """The row whose product with the final hidden states is `_LOGIT` on average, for the weights of this model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(MODEL)("The history of the sea and of its ships is long. " * 4)["input_ids"]
    with torch.inference_mode():
        mean = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0].mean(0)
        row: torch.Tensor = (mean * (_LOGIT / mean.dot(mean))).to(torch.bfloat16)
        return row


def main() -> None:
    """Answer commands, one JSON object a line, until stdin ends."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(2)
    trainer = Trainer(Path(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        started = time.perf_counter()
        answer = getattr(trainer, command.pop("do"))(**command)
        print(json.dumps(answer | {"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
