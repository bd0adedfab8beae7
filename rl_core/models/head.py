"""Log-probabilities of target tokens, in chunks of rows, so that no [tokens, vocabulary] matrix exists whole.

The first chunks keep their exponentials for the backward; rows beyond are multiplied again there, which bounds memory
for long batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.parameters import Weight

CHUNK_ROWS = 128
KEPT_CHUNKS = 4


def _exponentials(h: Tensor, table: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits over the temperature [m, V] fp32, their exponentials after the maximum [m, V], and log Z [m, 1]."""
    logits = torch.mm(h, table.t()).float().div_(temperatures[:, None])
    top = logits.amax(dim=-1, keepdim=True)
    exponentials = torch.exp(logits - top)
    return logits, exponentials, exponentials.sum(dim=-1, keepdim=True).log_().add_(top)


class TargetLogprobs(torch.autograd.Function):
    """Log-probability of each target under softmax(h tableᵀ / temperature), and the entropy there (no gradient).

    Shapes: h [M, D], table [V, D], targets [M], temperatures [M] → logprobs [M], entropies [M], fp32, in nats.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, targets: Tensor, temperatures: Tensor, table: Weight, train: bool
    ) -> tuple[Tensor, Tensor]:
        """Chunk by chunk."""
        logprobs, entropies = torch.empty(h.shape[0]), torch.empty(h.shape[0])
        kept: list[Tensor] = []
        for number, start in enumerate(range(0, h.shape[0], CHUNK_ROWS)):
            part = slice(start, start + CHUNK_ROWS)
            logits, exponentials, log_z = _exponentials(h[part], table.value, temperatures[part])
            logprobs[part] = (logits.gather(1, targets[part, None]) - log_z).squeeze(1)
            total = exponentials.sum(dim=-1)
            entropies[part] = log_z.squeeze(1) - (logits.mul_(exponentials)).sum(dim=-1) / total
            if train and number < KEPT_CHUNKS:
                kept.append(exponentials.div_(total[:, None]))
        ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(h, targets, temperatures)
        ctx.kept, ctx.table = kept, table
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Gradient of h; adds the table's. d logp / d logits = (onehot − p) / temperature."""
        h, targets, temperatures = ctx.saved_tensors
        table: Weight = ctx.table
        dh = torch.empty_like(h)
        kept: list[Tensor] = ctx.kept
        for start in range(0, h.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            if kept:
                probabilities = kept.pop(0)
            else:
                _, exponentials, _ = _exponentials(h[part], table.value, temperatures[part])
                probabilities = exponentials.div_(exponentials.sum(dim=-1, keepdim=True))
            coefficient = (dlogprobs[part] / temperatures[part])[:, None]
            dlogits = probabilities.mul_(-coefficient)
            dlogits.scatter_add_(1, targets[part, None], coefficient)
            low = dlogits.to(h.dtype)
            torch.mm(low, table.value, out=dh[part])
            table.accumulate(low, h[part])
        return dh, None, None, None, None
