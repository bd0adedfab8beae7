"""The forward pass over packed weights and the key/value cache, for one prefill chunk or one decode batch.

Rows of different sequences meet only in matrix products over tokens; attention sees one sequence's row each. The
grouped query heads stand in the query dimension, so keys and values are read once and never repeated.
Left out: training, dropout, sliding windows longer sequences would need.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from numpy.typing import NDArray
from torch import Tensor

from rl_core.engines.kv import KvCache
from rl_core.engines.rope import RotaryTables, rotate
from rl_core.engines.weights import LayerWeights, MoeFfn, WeightSet

# Splitting the decode batch pays when it saves this share of the padded key/value reads.
_SPLIT_SAVING = 0.35
_SPLIT_ROWS = 8


class _Attention(Protocol):
    """Writes one layer's keys and values and attends to the cache. Shapes: q `[M, H, D]` → `[M, H·D]`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class _Prefill:
    """A chunk of one row: tokens `[start, start + C)`, causal among themselves, seeing all before them."""

    def __init__(self, cache: KvCache, *, row: int, start: int, count: int) -> None:
        self._cache, self._row, self._start, self._end = cache, row, start, start + count
        group = cache.config.group
        reach = torch.arange(start, self._end).unsqueeze(1)
        hidden = torch.arange(self._end) > reach
        mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, float("-inf"))
        self._mask = mask.repeat(group, 1).view(1, 1, group * count, self._end)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, row = self._cache, self._row
        keys, values = cache.keys[layer, row], cache.values[layer, row]
        keys[:, self._start : self._end] = k.transpose(0, 1)
        values[:, self._start : self._end] = v.transpose(0, 1)
        count, kv_heads, width = k.shape
        group = cache.config.group
        # [C, kv·G, D] → [1, kv, G·C, D]
        q = q.view(count, kv_heads, group, width).permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, width)
        seen_keys, seen_values = keys[None, :, : self._end], values[None, :, : self._end]
        out = F.scaled_dot_product_attention(q, seen_keys, seen_values, attn_mask=self._mask)
        return out.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(count, -1)


class _Decode:
    """One token for each of the rows `[0, B)`, at its own position."""

    def __init__(self, cache: KvCache, *, positions: list[int]) -> None:
        self._cache = cache
        self._rows = torch.arange(len(positions))
        self._positions = torch.tensor(positions)
        self._parts = [(a, b, self._mask(positions[a:b])) for a, b in _split(positions)]

    def _mask(self, positions: list[int]) -> Tensor:
        longest = max(positions) + 1
        hidden = torch.arange(longest) > torch.tensor(positions).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype).masked_fill_(hidden, float("-inf"))
        config = self._cache.config
        return mask[:, None, None, :].expand(-1, config.kv_heads, config.group, -1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k
        values[self._rows, :, self._positions] = v
        rows, kv_heads, width = k.shape
        q = q.view(rows, kv_heads, -1, width)
        parts = []
        for first, last, mask in self._parts:
            length = mask.shape[-1]
            parts.append(
                F.scaled_dot_product_attention(
                    q[first:last], keys[first:last, :, :length], values[first:last, :, :length], attn_mask=mask
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(rows, -1)


def _split(positions: list[int]) -> list[tuple[int, int]]:
    """Cut the batch into runs of rows where reading all of it at its longest row's length would waste much."""
    count = len(positions)
    runs = [(first, min(first + _SPLIT_ROWS, count)) for first in range(0, count, _SPLIT_ROWS)]
    whole = count * (max(positions) + 1)
    cut = sum((last - first) * (max(positions[first:last]) + 1) for first, last in runs)
    return runs if cut < (1 - _SPLIT_SAVING) * whole else [(0, count)]


class Decoder:
    """Runs a weight set over a cache. Not thread-safe: one scheduler owns it."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._rotary = RotaryTables(cache.config, positions=cache.max_len, dtype=cache.dtype)

    @torch.inference_mode()
    def prefill(self, weights: WeightSet, *, row: int, tokens: list[int]) -> None:
        """Compute keys and values of `tokens` behind those of the row."""
        start = self._cache.rows[row].length
        attention = _Prefill(self._cache, row=row, start=start, count=len(tokens))
        positions = torch.arange(start, start + len(tokens))
        _, routes = self._forward(weights, tokens, positions, attention)
        if routes is not None:
            self._cache.routes[row, start : start + len(tokens)] = routes
        self._cache.extend(row, tokens)

    @torch.inference_mode()
    def decode(self, weights: WeightSet, *, tokens: list[int]) -> Tensor:
        """Feed one token to each of the first rows. Shapes: B tokens → logits `[B, V]` in float32."""
        positions = [self._cache.rows[row].length for row in range(len(tokens))]
        attention = _Decode(self._cache, positions=positions)
        hidden, routes = self._forward(weights, tokens, torch.tensor(positions), attention)
        for row, token in enumerate(tokens):
            if routes is not None:
                self._cache.routes[row, positions[row]] = routes[row]
            self._cache.extend(row, [token])
        hidden = F.rms_norm(hidden, hidden.shape[-1:], weights.norm, weights.config.rms_eps)
        return weights.head(hidden).float()

    def _forward(
        self, weights: WeightSet, tokens: list[int], positions: Tensor, attention: _Attention
    ) -> tuple[Tensor, NDArray[np.int64] | None]:
        """Hidden states `[M, D]` before the last norm, and routes `[M, L, K]`."""
        config = weights.config
        hidden = F.embedding(torch.tensor(tokens), weights.embedding).to(weights.dtype)
        cos, sin = self._rotary.at(positions)
        routes: list[Tensor] = []
        turned, kv = config.heads + config.kv_heads, config.kv_heads
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, config.rms_eps)
            qkv = layer.qkv(normed).view(len(tokens), turned + kv, config.head_dim)
            qk = rotate(qkv[:, :turned], cos, sin)
            out = attention(index, qk[:, : config.heads], qk[:, config.heads :], qkv[:, turned:])
            hidden = layer.out.add(out, hidden)
            hidden = _ffn(layer, hidden, config.rms_eps, config.top_k, routes)
        return hidden, torch.stack(routes, dim=1).numpy() if routes else None


def _ffn(layer: LayerWeights, hidden: Tensor, eps: float, top_k: int, routes: list[Tensor]) -> Tensor:
    normed = F.rms_norm(hidden, hidden.shape[-1:], layer.ffn_norm, eps)
    ffn = layer.ffn
    if not isinstance(ffn, MoeFfn):
        return ffn.down.add(ffn.up.mul(normed, ffn.gate.silu(normed)), hidden)
    scores = torch.softmax(F.linear(normed, ffn.router).float(), dim=-1)
    gates, experts = torch.topk(scores, top_k, dim=-1)
    gates = (gates / gates.sum(dim=-1, keepdim=True)).to(hidden.dtype)
    routes.append(experts)
    mix = _mix_fused if ffn.fused else _mix_sorted
    return mix(ffn, normed, hidden, gates, experts)


def _mix_fused(ffn: MoeFfn, normed: Tensor, hidden: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Every expert for every token in two products; the gates of experts not chosen are zero."""
    inner = ffn.up[0].mul(normed, ffn.gate[0].silu(normed))
    spread = torch.zeros(len(normed), ffn.router.shape[0], dtype=hidden.dtype).scatter_(1, experts, gates)
    weighted = inner.view(len(normed), ffn.router.shape[0], -1) * spread.unsqueeze(-1)
    return ffn.down[0].add(weighted.view(len(normed), -1), hidden)


def _mix_sorted(ffn: MoeFfn, normed: Tensor, hidden: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Each expert for its own tokens."""
    out = hidden.clone()
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=ffn.router.shape[0]).tolist()
    owners, weights = order // experts.shape[1], gates.flatten()[order].unsqueeze(1)
    first = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = owners[first : first + count]
        x = normed[chosen]
        y = ffn.down[expert](ffn.up[expert].mul(x, ffn.gate[expert].silu(x)))
        out.index_add_(0, chosen, y.mul_(weights[first : first + count]))
        first += count
    return out
