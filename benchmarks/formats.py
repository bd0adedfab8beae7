"""Serving formats of SmolLM2-135M: what a step's delta weighs in each, against the whole weights in that format.

The pairs are the real ones of `delta`. `ratio_*` is plain bytes of the format ÷ published bytes, manifest included,
`changed_*` the share of its elements that differ, packed pairs and scales counted as one element each.
"""

from __future__ import annotations

import tempfile
import time

import torch

from benchmarks.delta_pairs import Weights, real_pair
from benchmarks.measure import Progress, peak_rss_mb
from rl_core.delta import Base, Published, publish_delta, weights_root
from rl_core.formats import quantised_names, serving_weights
from rl_core.store import open_store
from rl_core.types import VersionRef, WeightFormat

LEARNING_RATES = {"1e6": 1e-6, "3e6": 3e-6, "1e5": 1e-5}


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Every format at three learning rates; a quick run takes a part of the weights."""
    torch.set_num_threads(2)
    result: dict[str, object] = {"pairs": "real"}
    for name, lr in LEARNING_RATES.items():
        old, new = (_part(weights, quick=quick) for weights in real_pair(lr, progress=progress))
        for weight_format in WeightFormat:
            progress(f"{weight_format} at lr {lr:g}")
            started = time.perf_counter()
            pair = serving_weights(old, weight_format), serving_weights(new, weight_format)
            derive_s = (time.perf_counter() - started) / 2
            made = _published(*pair)
            key = weight_format.replace("-", "_")
            result[f"ratio_{key}_{name}"] = made.full_bytes / made.bytes
            result[f"changed_{key}_{name}"] = made.changed_elements / made.elements
            if name == "1e6":
                result[f"full_mb_{key}"] = made.full_bytes / 1e6
                result[f"delta_mb_{key}"] = made.bytes / 1e6
                result[f"derive_s_{key}"] = derive_s
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def _part(weights: Weights, *, quick: bool) -> Weights:
    """All of the weights; of a quick run those of the first two layers that a format changes."""
    names = quantised_names(weights)
    return {name: weights[name] for name in (names[: 2 * 7] if quick else sorted(weights))}


def _published(old: Weights, new: Weights) -> Published:
    base, version = Base("bench:0-0", weights_root(old)), VersionRef("bench", 0, 1)
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        return publish_delta(open_store(folder), old=old, new=new, version=version, base=base, fence=0, threads=2)
