"""Tokens and their logprobs from logits. Logprobs are of the distribution that was actually sampled from.

That is: after temperature, and renormalised after top-k and top-p. A greedy token has no such distribution; its
logprob is that of temperature 1. Each row brings its own uniform number, so that what a request draws does not depend
on its batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

_BLOCK: Final = 256
# Top-p first looks among this many tokens; it sorts the whole vocabulary only when they do not hold enough.
_NUCLEUS: Final = 1024


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn: `uniform` in [0, 1); `tops` alternatives are reported beside the token."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float
    tops: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token, its logprob, and the most likely tokens with theirs."""

    token: int
    logprob: float
    tops: tuple[tuple[int, float], ...] = ()


def sample(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Draw one token per row. Shapes: logits float32 `[B, V]`, B draws."""
    results: list[Sampled | None] = [None] * len(draws)
    plain = [i for i, d in enumerate(draws) if d.temperature > 0 and d.top_p >= 1 and not d.top_k]
    if plain:
        chosen = logits_BV if len(plain) == len(draws) else logits_BV[plain]
        for row, result in zip(plain, _inverse_cdf(chosen, [draws[i] for i in plain]), strict=True):
            results[row] = result
    for row, draw in enumerate(draws):
        if results[row] is None:
            one = _greedy if draw.temperature == 0 else _truncated
            results[row] = one(logits_BV[row], draw)
    return [result for result in results if result is not None]


def _inverse_cdf(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Invert the cumulative distribution in two levels: over blocks of the vocabulary, then within one block."""
    if any(draw.temperature != 1.0 for draw in draws):
        logits = logits / torch.tensor([draw.temperature for draw in draws]).unsqueeze(1)
    rows, vocab = logits.shape
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    mass = shifted.exp()
    if vocab % _BLOCK:
        mass = F.pad(mass, (0, _BLOCK - vocab % _BLOCK))
    mass = mass.view(rows, -1, _BLOCK)
    blocks = mass.sum(dim=-1).double()
    ends = blocks.cumsum(dim=-1)
    total = ends[:, -1:]
    target = total * torch.tensor([[draw.uniform] for draw in draws], dtype=torch.float64)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks.shape[1] - 1)
    rest = target - (ends.gather(1, block) - blocks.gather(1, block))
    inner = mass[torch.arange(rows), block[:, 0]]
    place = torch.searchsorted(inner.double().cumsum(dim=-1), rest, right=True).clamp_(max=_BLOCK - 1)
    # Rounding at a block's edge can point at a token without mass: take the block's likeliest instead.
    place = torch.where(inner.gather(1, place) > 0, place, inner.argmax(dim=-1, keepdim=True))
    token = block * _BLOCK + place
    log_total = total.log()
    logprob = shifted.gather(1, token).double() - log_total
    pairs = zip(token[:, 0].tolist(), logprob[:, 0].tolist(), strict=True)
    return [Sampled(t, p, _tops(shifted[i] - log_total[i].float(), draws[i].tops)) for i, (t, p) in enumerate(pairs)]


def _greedy(logits: Tensor, draw: Draw) -> Sampled:
    logprobs = F.log_softmax(logits, dim=-1)
    token = int(logits.argmax())
    return Sampled(token, float(logprobs[token]), _tops(logprobs, draw.tops))


def _truncated(logits: Tensor, draw: Draw) -> Sampled:
    """Draw from the smallest set of likeliest tokens that top-k and top-p leave."""
    scaled = logits / draw.temperature
    vocab = scaled.numel()
    log_total = torch.logsumexp(scaled.double(), dim=-1)
    width = min(draw.top_k or _NUCLEUS, vocab)
    values, tokens = scaled.topk(width)
    if draw.top_p < 1:
        # Top-p is taken of what top-k leaves, as most engines do.
        if draw.top_k:
            log_total = torch.logsumexp(values.double(), dim=-1)
        held = (values.double() - log_total).exp().cumsum(dim=-1)
        if not draw.top_k and float(held[-1]) < draw.top_p and width < vocab:
            values, tokens = scaled.sort(descending=True)
            held = (values.double() - log_total).exp().cumsum(dim=-1)
        kept = min(int(torch.searchsorted(held, draw.top_p)) + 1, held.numel())
        values, tokens = values[:kept], tokens[:kept]
    logprobs = F.log_softmax(values.double(), dim=-1)
    ends = logprobs.exp().cumsum(dim=-1)
    place = min(int(torch.searchsorted(ends, draw.uniform * float(ends[-1]), right=True)), ends.numel() - 1)
    tops = tuple(zip(tokens[: draw.tops].tolist(), logprobs[: draw.tops].tolist(), strict=True))
    return Sampled(int(tokens[place]), float(logprobs[place]), tops)


def _tops(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    values, tokens = logprobs.topk(min(count, logprobs.numel()))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))
