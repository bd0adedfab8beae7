"""Deltas against what others ship: bytes, and speed beside memcpy, on the weights of SmolLM2-135M-Instruct.

Sizes are of real consecutive weights (`delta_pairs.real_pair`), published bytes, manifest included; a `_max` is the
worst of three learning rates. Speeds are of model bytes, one thread, without hashing and storing, as ratios to a memcpy
of the same tensors taken in turn, on pairs of two densities that follow the law of training. `read_both` is the floor
of every encoder: to read old and new weights once. `bound` is the entropy of places and differences given tensor and
old exponent; see `delta_peers` for it and for the peers. `_vs_peer` is beside the fastest compressed peer with numpy,
`_vs_peer_compiled` beside the fastest one that is given our own comparison.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from blake3 import blake3

from benchmarks import delta_peers
from benchmarks.delta_pairs import Weights, real_pair, stepped
from benchmarks.measure import Progress, interleaved_medians, peak_rss_mb, rounds
from rl_core.delta import Base, publish_delta, weights_root
from rl_core.delta.codec import EncodedFrame, Profile, decode_frame, encode_frame
from rl_core.delta.frames import pieces_of, plan_frames
from rl_core.delta.manifest import TensorRange
from rl_core.delta.words import Words, dtype_tag, total_bytes, words_of
from rl_core.store import open_store
from rl_core.types import VersionRef

LEARNING_RATES = {"1e6": 1e-6, "3e6": 3e-6, "1e5": 1e-5}
DENSITIES = {"": 0.0025, "_dense": 0.017}
_QUICK_BYTES = 96 << 20


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Sizes at three learning rates, speeds at two densities, each for both profiles."""
    torch.set_num_threads(2)
    result: dict[str, object] = {"pairs": "real"}
    for number, (name, lr) in enumerate(LEARNING_RATES.items(), 1):
        old, new = (_part(weights, quick=quick) for weights in real_pair(lr, progress=progress))
        _merge_worst(result, _sizes(old, new, name=name, number=number, progress=progress))
    torch.set_num_threads(1)
    result["mib"] = total_bytes(old) / 2**20
    for suffix, density in DENSITIES.items():
        progress(f"speeds at {density:.2%}")
        pair = _Pair.of(old, stepped(old, density=density, seed=9))
        result |= _speeds(pair, suffix=suffix, repeats=rounds(quick=quick))
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def _part(weights: Weights, *, quick: bool) -> Weights:
    kept: Weights = {}
    for name in sorted(weights):
        if not quick or total_bytes(kept) < _QUICK_BYTES:
            kept[name] = weights[name]
    return kept


def _merge_worst(result: dict[str, object], found: dict[str, float]) -> None:
    for key, value in found.items():
        before = result.get(key, 0.0)
        result[key] = max(value, float(str(before))) if key.endswith("_max") else value


def _sizes(old: Weights, new: Weights, *, name: str, number: int, progress: Progress) -> dict[str, float]:
    flat_old, flat_new = _flat(old), _flat(new)
    sizes = {
        "pulse": float(len(delta_peers.pulse(flat_old, flat_new))),
        "coo": float(len(delta_peers.coo(flat_old, flat_new))),
        "bound": delta_peers.bound_bytes([(words_of(old[tensor]), words_of(new[tensor])) for tensor in old]),
    }
    base, version = Base("bench:0-0", weights_root(old)), VersionRef("bench", 0, number)
    result = {}
    for profile in Profile:
        with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
            published = publish_delta(
                open_store(folder),
                old=old,
                new=new,
                version=version,
                base=base,
                fence=0,
                verify_base=False,
                profile=profile,
            )
        result[f"density_{name}"] = published.changed_elements / published.elements
        result[f"{profile}_ratio_{name}"] = published.full_bytes / published.bytes
        result |= {f"{profile}_bytes_vs_{peer}_max": published.bytes / size for peer, size in sizes.items()}
        result |= {f"{peer}_ratio_{name}": published.full_bytes / sizes[peer] for peer in ("pulse", "coo")}
        beside = ", ".join(f"{peer} {size:.0f}" for peer, size in sizes.items())
        progress(f"{profile} at lr {name}: {published.bytes} bytes ({beside})")
    return result


def _flat(weights: Weights) -> Words:
    return np.concatenate([words_of(weights[name]) for name in sorted(weights)])


@dataclass
class _Pair:
    """Two models in frames, as the publisher and the receiver see them. `scratch` is what decoding writes to.

    The tensors of each lie one after another in `flat_old` and `flat_new`: all encoders read the same memory.
    """

    flat_old: Words
    flat_new: Words
    old: list[Words]
    new: list[Words]
    scratch: list[Words]
    plan: list[list[TensorRange]]

    @classmethod
    def of(cls, old: Weights, new: Weights) -> _Pair:
        names = sorted(old)
        cut = ((i, dtype_tag(old[n]), old[n].numel(), old[n].element_size()) for i, n in enumerate(names))
        flat_old, flat_new = _flat(old), _flat(new)
        ends = np.cumsum([old[n].numel() for n in names])[:-1]
        before, after, scratch = (np.split(flat, ends) for flat in (flat_old, flat_new, flat_old.copy()))
        return cls(flat_old, flat_new, before, after, scratch, plan_frames(cut))

    def encode(self, profile: Profile, ranges: list[TensorRange]) -> EncodedFrame:
        return encode_frame(old=pieces_of(ranges, self.old), new=pieces_of(ranges, self.new), profile=profile)

    def encode_all(self, profile: Profile, pool: ThreadPoolExecutor | None = None) -> list[EncodedFrame]:
        return list((map if pool is None else pool.map)(partial(self.encode, profile), self.plan))

    def reset(self) -> None:
        """Make `scratch` the old weights again; also the memcpy that speeds are compared with."""
        for source, target in zip(self.old, self.scratch, strict=True):
            np.copyto(target, source)

    def decode_all(self, frames: list[EncodedFrame]) -> None:
        for ranges, frame in zip(self.plan, frames, strict=True):
            pieces = pieces_of(ranges, self.scratch)
            for patch, words in zip(decode_frame(frame.mode, frame.payload, pieces=pieces), pieces, strict=True):
                patch.apply(words)


def _speeds(pair: _Pair, *, suffix: str, repeats: int) -> dict[str, object]:
    flat_old, flat_new = pair.flat_old, pair.flat_new
    frames = {profile: pair.encode_all(profile) for profile in Profile}

    with ThreadPoolExecutor(2) as pool:
        candidates: dict[str, Callable[[], object]] = {
            name: partial(peer, flat_old, flat_new)
            for name, peer in (delta_peers.COMPRESSED | delta_peers.COMPILED).items()
        }
        candidates["read_both"] = partial(delta_peers.read_both, flat_old, flat_new)
        for profile in Profile:
            candidates |= {
                f"{profile}_encode": partial(pair.encode_all, profile),
                f"{profile}_reset": pair.reset,  # decoding needs the old weights; it is the memcpy, too
                f"{profile}_decode": partial(pair.decode_all, frames[profile]),
            }
        candidates["small_encode_2t"] = partial(pair.encode_all, Profile.SMALL, pool)
        candidates["coo"] = partial(delta_peers.coo, flat_old, flat_new)
        candidates["blake3"] = lambda: blake3(flat_new.view(np.uint8).data).digest()  # what verifying adds to decoding
        seconds = interleaved_medians(candidates, repeats=repeats)
    result: dict[str, object] = {f"memcpy_gb_s{suffix}": flat_old.nbytes / seconds["fast_reset"] / 1e9}
    peer = min(seconds[name] for name in delta_peers.COMPRESSED)
    peer_compiled = min(seconds[name] for name in delta_peers.COMPILED)
    for name in ("read_both", "pulse_encode", "coo_encode", "blake3"):
        result[f"{name}_vs_memcpy{suffix}"] = seconds["fast_reset"] / seconds[name.removesuffix("_encode")]
    for profile in Profile:
        copy = seconds[f"{profile}_reset"]
        result |= {
            f"{profile}_encode_vs_memcpy{suffix}": copy / seconds[f"{profile}_encode"],
            f"{profile}_decode_vs_memcpy{suffix}": copy / seconds[f"{profile}_decode"],
            f"{profile}_encode_vs_peer{suffix}": peer / seconds[f"{profile}_encode"],
            f"{profile}_encode_vs_peer_compiled{suffix}": peer_compiled / seconds[f"{profile}_encode"],
        }
    return result if suffix else result | {"scaling_2t": seconds["small_encode"] / seconds["small_encode_2t"]}
