"""Tiny random models as Hugging Face folders, engines on them, and the transformers forward they are held against."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rl_core.chat import ChatTokenizer
from rl_core.engines.engine import Engine
from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.request import ActiveSequence, OnToken, Request
from rl_core.engines.scheduler import SchedulerLimits
from rl_core.models.checkpoint import read_checkpoint, write_checkpoint
from rl_core.types import Generated, SamplingParams

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer of 256 bytes and three special tokens; the size of its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def make_model_folder(
    folder: Path, *, routed: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """Write a tiny random Llama or Mixtral with spread-out logits, so that sampling and greedy are worth checking."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder)
    sizes: dict[str, object] = {
        "vocab_size": vocab, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 258,
        "bos_token_id": 257, "tie_word_embeddings": not routed, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(seed)
    if routed:
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        model = MixtralForCausalLM(MixtralConfig(**{**sizes, **overrides}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))
    model.to(dtype).save_pretrained(folder)
    return folder


def endless_model_folder(folder: Path, *, routed: bool = False, **overrides: Any) -> Path:
    """A model that ends a sequence only by its limit, so that swaps meet every one of them."""
    make_model_folder(folder, routed=routed, **overrides)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace('"eos_token_id": 258', '"eos_token_id": 100000'))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def hf_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_engine(folder: Path, **overrides: object) -> Engine:
    limits = {"max_seqs": 16, "max_len": 256, "retained": 16, "prefill_chunk": 16}
    slots = overrides.pop("slots", ("default",))
    dtype = overrides.pop("dtype", ComputeDtype.FLOAT32)
    return Engine.load(
        folder, codec=ChatTokenizer.load(folder), limits=SchedulerLimits(**{**limits, **overrides}),
        dtype=dtype, slots=slots,
    )  # fmt: skip


def random_prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


class Gate:
    """An `on_token` that holds the decode thread at the n-th token until it is opened."""

    def __init__(self, count: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._left = count

    def __call__(self, _: object) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.open.wait(60)


def submit(
    engine: Engine, prompt: list[int], *, slot: str | None = None, on_token: OnToken | None = None, **fields: Any
) -> ActiveSequence:
    own = ("routes", "tops", "min_version", "exact_version")
    request_fields = {key: fields.pop(key) for key in own if key in fields}
    request = Request(prompt=prompt, sampling=SamplingParams(**fields), **request_fields)
    return engine.submit(request, slot=slot, on_token=on_token)


def generate(engine: Engine, prompt: list[int], *, slot: str | None = None, **fields: Any) -> Generated:
    return submit(engine, prompt, slot=slot, **fields).future.result(120)


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def perturbed(tensors: Mapping[str, torch.Tensor], *, seed: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    """New values for a share of the tensors, far enough off that no logprob stays the same."""
    generator = torch.Generator().manual_seed(seed)
    names = sorted(tensors)[:: max(1, round(1 / share))]
    return {
        name: (tensors[name].float() + 0.05 * torch.randn(tensors[name].shape, generator=generator)).to(
            tensors[name].dtype
        )
        for name in names
    }


def hf_with(folder: Path, changed: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The transformers model of the folder with some of its checkpoint's tensors replaced, by way of a new folder."""
    other = folder.with_name(f"{folder.name}-changed-{len(list(folder.parent.iterdir()))}")
    tensors = {**read_checkpoint(folder), **changed}
    write_checkpoint(other, tensors, like=folder)
    return hf_model(other)


@torch.no_grad()
def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Logprob of each completion token by a plain forward of transformers, at `temperature` (0 counts as 1)."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
    scaled = logits / (temperature or 1.0)
    return torch.log_softmax(scaled, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
