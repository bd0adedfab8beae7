"""Attention over a pack of trees: rotary positions, grouped queries, a shared prefix read by all its branches.

The forward keeps only its input; the backward computes the probabilities again (a few percent of the time, and the
largest single saving of memory). Queries of one key head are stacked, so that every product is one large `bmm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.architecture import Architecture
from rl_core.models.packing import Pack, Piece


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables of one pack. Shapes: cos, sin [N, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def make_rope(arch: Architecture, positions: Tensor) -> Rope:
    """Tables for the pack's positions. Source: Su et al. 2021 (arXiv:2104.09864), in Llama's half-rotated layout."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    angles = positions[:, None].float() * (1.0 / arch.rope_theta**exponents)[None, :]
    return Rope(angles.cos()[:, None, :], angles.sin()[:, None, :])


def _rotate(x: Tensor, rope: Rope, *, inverse: bool = False) -> Tensor:
    """Rotate [N, H, d]; the inverse is the transpose, which the backward needs."""
    half = x.shape[-1] // 2
    sin = -rope.sin if inverse else rope.sin
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * rope.cos - b * sin, b * rope.cos + a * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Per-head layout. Shapes: q [K, G, N, d] scaled; k, v [K, N, d], with K key heads and G queries to each."""

    q: Tensor
    k: Tensor
    v: Tensor


def _split(qkv: Tensor, rope: Rope, arch: Architecture) -> _Heads:
    n = qkv.shape[0]
    wide, narrow = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    q, k, v = torch.split(qkv, [wide, narrow, narrow], dim=1)
    q = _rotate(q.view(n, arch.heads, arch.head_dim), rope) * arch.head_dim**-0.5
    k = _rotate(k.view(n, arch.kv_heads, arch.head_dim), rope)
    group = arch.heads // arch.kv_heads
    return _Heads(
        q=q.view(n, arch.kv_heads, group, arch.head_dim).permute(1, 2, 0, 3).contiguous(),
        k=k.transpose(0, 1).contiguous(),
        v=v.reshape(n, arch.kv_heads, arch.head_dim).transpose(0, 1).contiguous(),
    )


def _gather_queries(q: Tensor, piece: Piece) -> Tensor:
    """[K, G, N, d] to [K, B, G, L, d]."""
    b, length = piece.rows.shape
    picked = q.index_select(2, piece.rows.flatten())
    return picked.view(*q.shape[:2], b, length, q.shape[-1]).transpose(1, 2).contiguous()


def _gather_keys(k: Tensor, piece: Piece) -> Tensor:
    """[K, N, d] to [K·B, L, d]."""
    b, length = piece.rows.shape
    return k.index_select(1, piece.rows.flatten()).view(k.shape[0] * b, length, k.shape[-1])


@dataclass(frozen=True, slots=True)
class _Read:
    """What one piece reads. Shapes: q [K, B, G, L, d]; own keys [K·B, L, d]; prefix keys [K, P, d] or None."""

    q: Tensor
    k_own: Tensor
    v_own: Tensor
    k_prefix: Tensor | None
    v_prefix: Tensor | None

    @classmethod
    def of(cls, heads: _Heads, piece: Piece) -> _Read:
        shared = len(piece.prefix) > 0
        return cls(
            q=_gather_queries(heads.q, piece),
            k_own=_gather_keys(heads.k, piece),
            v_own=_gather_keys(heads.v, piece),
            k_prefix=heads.k.index_select(1, piece.prefix) if shared else None,
            v_prefix=heads.v.index_select(1, piece.prefix) if shared else None,
        )

    def per_prefix(self, x: Tensor) -> Tensor:
        """Rows that read one prefix, stacked. Shape: [K, B·G·L, ·]."""
        return x.reshape(self.q.shape[0], -1, x.shape[-1])

    def per_own(self, x: Tensor) -> Tensor:
        """Rows that read one branch, stacked. Shape: [K·B, G·L, ·]."""
        return x.reshape(self.k_own.shape[0], -1, x.shape[-1])

    def against(self, x: Tensor, prefix: Tensor | None, own: Tensor) -> Tensor:
        """Multiply x by prefix and own, transposed, side by side. Shapes: x [K, B, G, L, d] → [K, B, G, L, P + L]."""
        k, b, g, length, _ = x.shape
        right = torch.bmm(self.per_own(x), own.transpose(1, 2)).view(k, b, g, length, length)
        if prefix is None:
            return right
        left = torch.bmm(self.per_prefix(x), prefix.transpose(1, 2)).view(k, b, g, length, -1)
        return torch.cat((left, right), dim=-1)

    def mix(self, weights: Tensor, prefix: Tensor | None, own: Tensor) -> Tensor:
        """Sum prefix and own by weights [K, B, G, L, P + L]. Shape: [K, B, G, L, d]."""
        p = 0 if prefix is None else prefix.shape[1]
        out = torch.bmm(self.per_own(weights[..., p:]), own)
        if prefix is not None:
            out = out.view(self.q.shape[0], -1, own.shape[-1]) + torch.bmm(self.per_prefix(weights[..., :p]), prefix)
        return out.view(self.q.shape)

    def probabilities(self) -> Tensor:
        """Softmax over prefix and own tokens up to the query's. Shape: [K, B, G, L, P + L], fp32."""
        scores = self.against(self.q, self.k_prefix, self.k_own).float()
        length = self.q.shape[3]
        p = scores.shape[-1] - length
        future = torch.ones(length, length, dtype=torch.bool).triu_(1)
        scores[..., p:].masked_fill_(future, float("-inf"))
        return torch.softmax(scores, dim=-1)


class TreeAttention(torch.autograd.Function):
    """qkv [N, (H + 2K)·d] to heads' outputs [N, H·d]; each token sees its own past: prefix and branch."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rope: Rope, pack: Pack, arch: Architecture) -> Tensor:
        """Attend, piece by piece."""
        heads = _split(qkv, rope, arch)
        out = torch.empty_like(heads.q)
        for piece in pack.pieces:
            read = _Read.of(heads, piece)
            weights = read.probabilities().to(qkv.dtype)
            _scatter(out, piece, read.mix(weights, read.v_prefix, read.v_own))
        merged = _merge(out)
        ctx.save_for_backward(qkv, merged)
        ctx.rope, ctx.pack, ctx.arch = rope, pack, arch
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of qkv; probabilities are computed again."""
        qkv, merged = ctx.saved_tensors
        arch: Architecture = ctx.arch
        heads = _split(qkv, ctx.rope, arch)
        douts = _unmerge(dout, arch)
        rowdots = (douts.float() * _unmerge(merged, arch).float()).sum(-1, keepdim=True)
        grads = _Heads(torch.zeros_like(heads.q), torch.zeros_like(heads.k), torch.zeros_like(heads.v))
        for piece in ctx.pack.pieces:
            _backward_piece(heads, grads, piece, douts, rowdots)
        return _join(grads, ctx.rope, arch), None, None, None


def _backward_piece(heads: _Heads, grads: _Heads, piece: Piece, douts: Tensor, rowdots: Tensor) -> None:
    read = _Read.of(heads, piece)
    weights = read.probabilities()
    b, length = piece.rows.shape
    real = piece.real.view(1, b, 1, length, 1)
    # Padded queries must send no gradient; padded keys are never seen by a real query.
    dy = _gather_queries(douts, piece) * real
    dscores = read.against(dy, read.v_prefix, read.v_own).float()
    dscores.sub_(_gather_queries(rowdots, piece)).mul_(weights)
    dscores *= real
    dscores, weights = dscores.to(dy.dtype), weights.to(dy.dtype)
    _scatter(grads.q, piece, read.mix(dscores, read.k_prefix, read.k_own))
    p = len(piece.prefix)
    for into, wide, rows in ((grads.k, dscores, read.q), (grads.v, weights, dy)):
        own = torch.bmm(read.per_own(wide[..., p:]).transpose(1, 2), read.per_own(rows))
        into.index_add_(1, piece.flat, own.view(into.shape[0], b * length, -1).index_select(1, piece.valid))
        if p:
            prefix = torch.bmm(read.per_prefix(wide[..., :p]).transpose(1, 2), read.per_prefix(rows))
            into.index_add_(1, piece.prefix, prefix)


def _scatter(out: Tensor, piece: Piece, values: Tensor) -> None:
    """Write [K, B, G, L, d] to its rows of [K, G, N, d]."""
    k, b, g, length, d = values.shape
    flat = values.transpose(1, 2).reshape(k, g, b * length, d)
    out.index_copy_(2, piece.flat, flat.index_select(2, piece.valid))


def _merge(out: Tensor) -> Tensor:
    """[K, G, N, d] to [N, H·d]."""
    return out.permute(2, 0, 1, 3).reshape(out.shape[2], -1)


def _unmerge(x: Tensor, arch: Architecture) -> Tensor:
    """[N, H·d] to [K, G, N, d]."""
    group = arch.heads // arch.kv_heads
    return x.view(-1, arch.kv_heads, group, arch.head_dim).permute(1, 2, 0, 3)


def _join(grads: _Heads, rope: Rope, arch: Architecture) -> Tensor:
    n = grads.k.shape[1]
    dq = grads.q.permute(2, 0, 1, 3).reshape(n, arch.heads, arch.head_dim) * arch.head_dim**-0.5
    dk = grads.k.transpose(0, 1)
    dv = grads.v.transpose(0, 1).reshape(n, -1)
    return torch.cat(
        (_rotate(dq, rope, inverse=True).reshape(n, -1), _rotate(dk, rope, inverse=True).reshape(n, -1), dv), dim=1
    )
