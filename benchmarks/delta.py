"""Deltas against what others ship: bytes, and speed beside memcpy, on the weights of SmolLM2-135M-Instruct.

Pairs of consecutive weights follow the law measured on real training (`pairs`: "law"): an AdamW step moves every
weight by about lr·|u|, so the chance that its bf16 word changes is min(1, lr·|u|·2^(7−e)) for the exponent e. Sizes
are published bytes, manifest included. Speeds are of model bytes, one thread, without hashing and storing, as ratios
to a memcpy of the same tensors taken in turn. `bound` is the entropy of the changed places given the tensor plus that
of the differences. Peers: COO is int32 index and bf16 value (TRL, vLLM); PULSE-like is 16-bit gaps and bf16 values
under zstd-1 over the whole model as one array.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard

from benchmarks.measure import Progress, interleaved_medians, peak_rss_mb, rounds
from rl_core.delta import Base, publish_delta, read_manifest, weights_root
from rl_core.delta.codec import EncodedFrame, decode_frame, encode_frame
from rl_core.delta.frames import pieces_of, plan_frames, split_patch
from rl_core.delta.manifest import TensorRange
from rl_core.delta.words import Words, dtype_tag, total_bytes, word_dtype, words_of
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef

MODEL = Path("var/models/smollm2-135m-instruct")
LEARNING_RATES = {"1e6": 1e-6, "3e6": 3e-6, "1e5": 1e-5}
DENSITIES = {"": 0.0025, "_dense": 0.017}
_MEAN_UPDATE = 0.4  # |u| of AdamW that reproduces the measured densities, 0.28 %, 0.74 % and 2.06 %
_QUICK_BYTES = 96 << 20

Weights = dict[str, torch.Tensor]


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Sizes at three learning rates, speeds at two densities, for the profile that exists (`small_`)."""
    torch.set_num_threads(1)
    old = _load(quick=quick)
    progress(f"weights: {len(old)} tensors, {total_bytes(old) / 2**20:.0f} MiB")
    result: dict[str, object] = {"pairs": "law", "missing": ["fast_ (profile)"], "mib": total_bytes(old) / 2**20}
    result |= _sizes(old, progress=progress)
    for suffix, density in DENSITIES.items():
        progress(f"speeds at {density:.2%}")
        result |= _speeds(old, density=density, suffix=suffix, repeats=rounds(quick=quick))
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def _load(*, quick: bool) -> Weights:
    weights: Weights = {}
    for name, tensor in read_checkpoint(MODEL).items():
        weights[name] = tensor.to(torch.bfloat16).clone()
    if not quick:
        return weights
    kept: Weights = {}
    for name in sorted(weights):
        if total_bytes(kept) < _QUICK_BYTES:
            kept[name] = weights[name]
    return kept


def _stepped(old: Weights, *, lr: float, seed: int = 0) -> Weights:
    """Weights one optimiser step later, by the law: lr·|u| ULPs, rounded up with the fraction's chance."""
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


def _sizes(old: Weights, *, progress: Progress) -> dict[str, object]:
    result: dict[str, object] = {}
    worst = {"pulse": 0.0, "coo": 0.0, "bound": 0.0}
    root = weights_root(old)
    for number, (name, lr) in enumerate(LEARNING_RATES.items(), 1):
        new = _stepped(old, lr=lr, seed=number)
        with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
            store = open_store(folder)
            base = Base("bench:0-0", root)
            version = VersionRef("bench", 0, number)
            published = publish_delta(store, old=old, new=new, version=version, base=base, fence=0, verify_base=False)
            stored = read_manifest(store, published.manifest_key).stored_bytes
        changed = published.changed_elements
        result[f"small_ratio_{name}"] = published.full_bytes / published.bytes
        result[f"small_density_{name}"] = changed / published.elements
        result["small_manifest_bytes"] = published.bytes - stored
        sizes = {"pulse": len(_pulse(_flat(old), _flat(new))), "coo": 6 * changed, "bound": _bound_bytes(old, new)}
        for peer, size in sizes.items():
            worst[peer] = max(worst[peer], published.bytes / size)
        progress(
            f"lr {lr:g}: density {changed / published.elements:.2%}, {published.bytes} bytes "
            f"(coo {sizes['coo']}, pulse-like {sizes['pulse']}, bound {sizes['bound']:.0f})"
        )
    return result | {f"small_bytes_vs_{peer}_max": ratio for peer, ratio in worst.items()}


def _flat(weights: Weights) -> Words:
    return np.concatenate([words_of(weights[name]) for name in sorted(weights)])


def _pulse(old: Words, new: Words) -> bytes:
    """16-bit gaps (a zero-difference entry bridges longer ones) and raw bf16 values, zstd-1."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=0)
    if gaps.size and gaps.max() > 0xFFFF:
        bridges = [np.arange(p - g + 0xFFFF, p, 0xFFFF) for p, g in zip(positions, gaps, strict=True) if g > 0xFFFF]
        positions = np.union1d(positions, np.concatenate(bridges))
        gaps = np.diff(positions, prepend=0)
    return zstandard.ZstdCompressor(level=1).compress(gaps.astype(np.uint16).tobytes() + new[positions].tobytes())


def _entropy_bits(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _bound_bytes(old: Weights, new: Weights) -> float:
    """Entropy of the changed places given their tensor, plus that of the differences, in bytes."""
    bits = 0.0
    histogram = np.zeros(1 << 16, np.int64)
    for name, tensor in old.items():
        before, after = words_of(tensor), words_of(new[name])
        changed = before != after
        count = int(np.count_nonzero(changed))
        bits += before.size * _entropy_bits(np.array([count, before.size - count]))
        histogram += np.bincount((after - before)[changed], minlength=1 << 16)
    return (bits + int(histogram.sum()) * _entropy_bits(histogram)) / 8


@dataclass
class _Pair:
    """Two models in frames, as the publisher and the receiver see them. `scratch` is what decoding writes to."""

    old: list[Words]
    new: list[Words]
    scratch: list[Words]
    plan: list[list[TensorRange]]
    frames: list[EncodedFrame]

    @classmethod
    def of(cls, old: Weights, new: Weights) -> _Pair:
        names = sorted(old)
        cut = ((i, dtype_tag(old[n]), old[n].numel(), old[n].element_size()) for i, n in enumerate(names))
        before, after = [words_of(old[n]) for n in names], [words_of(new[n]) for n in names]
        pair = cls(before, after, [array.copy() for array in before], plan_frames(cut), [])
        pair.frames = [pair.encode(ranges) for ranges in pair.plan]
        return pair

    def encode(self, ranges: list[TensorRange]) -> EncodedFrame:
        return encode_frame(old=pieces_of(ranges, self.old), new=pieces_of(ranges, self.new))

    def encode_all(self, pool: ThreadPoolExecutor | None = None) -> None:
        for _ in (map if pool is None else pool.map)(self.encode, self.plan):
            pass

    def decode_all(self) -> None:
        dtype = word_dtype("BF16")
        for ranges, frame in zip(self.plan, self.frames, strict=True):
            count = sum(piece.count for piece in ranges)
            patch = decode_frame(frame.mode, frame.payload, dtype=dtype, count=count)
            for part, words in zip(split_patch(patch, ranges), pieces_of(ranges, self.scratch), strict=True):
                part.apply(words)

    def copy_all(self) -> None:
        for source, target in zip(self.new, self.scratch, strict=True):
            np.copyto(target, source)


def _speeds(old: Weights, *, density: float, suffix: str, repeats: int) -> dict[str, object]:
    pair = _Pair.of(old, _stepped(old, lr=_lr_for(old, density=density), seed=9))
    flat_old, flat_new = np.concatenate(pair.old), np.concatenate(pair.new)
    with ThreadPoolExecutor(2) as pool:
        candidates: dict[str, Callable[[], object]] = {
            "copy": pair.copy_all,
            "encode": pair.encode_all,
            "decode": pair.decode_all,
            "peer": partial(_pulse, flat_old, flat_new),
            "encode_2t": partial(pair.encode_all, pool),
        }
        seconds = interleaved_medians(candidates, repeats=repeats)
    result: dict[str, object] = {
        f"small_encode_vs_memcpy{suffix}": seconds["copy"] / seconds["encode"],
        f"small_decode_vs_memcpy{suffix}": seconds["copy"] / seconds["decode"],
        f"small_encode_vs_peer{suffix}": seconds["peer"] / seconds["encode"],
        f"memcpy_gb_s{suffix}": flat_old.nbytes / seconds["copy"] / 1e9,
    }
    return result if suffix else result | {"scaling_2t": seconds["encode"] / seconds["encode_2t"]}
