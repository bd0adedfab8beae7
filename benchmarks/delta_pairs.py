"""Pairs of consecutive weights of SmolLM2-135M: real AdamW steps, made once and kept, and pairs of any density."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import Progress
from rl_core.models.smollm2 import find_gguf

Weights = dict[str, torch.Tensor]

MODEL = Path("var/models/smollm2-135m-instruct")
_KEPT = Path("var/benchmarks/pairs")
_STEPS = 7  # the pair is the last two: moments of the optimiser have filled by then
_BATCH = (3, 256)  # sequences, tokens
_SEED = 0
_MEAN_UPDATE = 0.4  # |u| of AdamW by the law that densities follow, see `stepped`


def real_pair(lr: float, *, progress: Progress) -> tuple[Weights, Weights]:
    """bf16 weights before and after the last of seven AdamW steps at `lr` on the standard library's own source text.

    The steps begin at the package's weights, moved by up to half a bf16 step each: they were dequantised from 4 bits,
    so that many are equal and would change together, which the fp32 masters of a training run do not.
    """
    paths = [_KEPT / f"{lr:g}-{which}.safetensors" for which in ("old", "new")]
    if not all(path.is_file() for path in paths):
        _make(lr, paths, progress=progress)
    old, new = (load_file(path) for path in paths)
    return old, new


def _make(lr: float, paths: list[Path], *, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * 2**-7)
    batches = _batches(AutoTokenizer.from_pretrained(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    before: Weights = {}
    for step in range(1, _STEPS + 1):
        before = _served(model) if step == _STEPS else {}
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(f"making the pair of lr {lr:g}: step {step} of {_STEPS}, loss {loss.item():.2f}")
    _KEPT.mkdir(parents=True, exist_ok=True)
    for path, weights in zip(paths, (before, _served(model)), strict=True):
        partial = path.with_suffix(".partial")
        save_file(weights, partial)
        partial.rename(path)


def _batches(tokenizer: object) -> Iterator[torch.Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "".join(path.read_text(errors="ignore") for path in files)[:400_000]
    tokens = torch.tensor(tokenizer(text)["input_ids"])  # type: ignore[operator]
    size = _BATCH[0] * _BATCH[1]
    return iter(tokens[: len(tokens) // size * size].view(-1, *_BATCH))


def _served(model: torch.nn.Module) -> Weights:
    """The weights as they ship: bf16, the tied head once."""
    return {
        name: tensor.detach().to(torch.bfloat16).clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def stepped(old: Weights, *, density: float, seed: int) -> Weights:
    """Weights of which about `density` have changed, by the law that training follows.

    An AdamW step moves every weight by about lr·|u|, so the chance that its bf16 word changes is min(1, lr·|u|·2^(7−e))
    for the exponent e: it halves with every binade.
    """
    lr = _lr_for(old, density=density)
    generator = torch.Generator().manual_seed(seed)
    new: Weights = {}
    for name, tensor in old.items():
        exponent = (torch.frexp(tensor.float())[1] - 1).float()
        update = torch.randn(tensor.shape, generator=generator).abs_().mul_(lr * _MEAN_UPDATE * (torch.pi / 2) ** 0.5)
        ulps = torch.ldexp(update, 7 - exponent).clamp_(max=1 << 12)
        ulps = ulps.add_(torch.rand(tensor.shape, generator=generator)).floor_()
        sign = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int16).mul_(2).sub_(1)
        new[name] = (tensor.view(torch.int16) + ulps.to(torch.int16) * sign).view(torch.bfloat16)
    return new


def _lr_for(old: Weights, *, density: float) -> float:
    """The learning rate at which the law gives this density."""
    counts = torch.zeros(512, dtype=torch.float64)
    for tensor in old.values():
        exponents = torch.frexp(tensor.float())[1].flatten().clamp(-255, 255) + 255
        counts += torch.bincount(exponents, minlength=512)
    shares, exponents = counts / counts.sum(), torch.arange(512) - 256
    low, high = 1e-9, 1e-2
    for _ in range(60):
        middle = (low * high) ** 0.5
        share = float(
            (shares * torch.ldexp(torch.full((512,), middle * _MEAN_UPDATE), 7 - exponents).clamp(max=1)).sum()
        )
        low, high = (middle, high) if share < density else (low, middle)
    return low
