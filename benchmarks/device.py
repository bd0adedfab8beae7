"""Frames compared where their weights are, beside fetching them and comparing them in the host's memory.

Of bf16 weights of normal distribution, changed by the law of training. On a machine without a GPU the device is the
CPU and nothing is fetched: then it is torch's operations beside the compiled loops, and why the host has those.
`compare` is the floor on the device, one comparison of old and new weights; `fetch`, on a GPU, that of the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.delta import DENSITIES
from benchmarks.delta_pairs import stepped
from benchmarks.measure import Progress, interleaved_medians, peak_rss_mb, rounds
from rl_core.delta.codec import EncodedFrame, Profile
from rl_core.delta.device import device_words, encode_where_they_are
from rl_core.delta.manifest import FRAME_BYTES

_FRAME_WORDS = FRAME_BYTES // 2
_FRAMES = {"cuda": 64, "cpu": 16}

Pieces = list[torch.Tensor]


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Both profiles at two densities."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result: dict[str, object] = {"device": name, "torch": torch.__version__}
    generator = torch.Generator().manual_seed(1)
    frames = _FRAMES[device.type] // (8 if quick else 1)
    weights = (torch.randn(_FRAME_WORDS, generator=generator).mul_(0.02).to(torch.bfloat16) for _ in range(frames))
    held = {f"{index:03}": tensor for index, tensor in enumerate(weights)}
    result["mib"] = frames * _FRAME_WORDS * 2 / 2**20
    for suffix, density in DENSITIES.items():
        progress(f"{frames} frames at {density:.2%} on {name}")
        changed = stepped(held, density=density, seed=9)
        old, new = ([device_words(side[name].to(device)) for name in held] for side in (held, changed))
        result |= _speeds(old, new, suffix=suffix, repeats=rounds(quick=quick))
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def _speeds(old: Pieces, new: Pieces, *, suffix: str, repeats: int) -> dict[str, object]:
    candidates: dict[str, Callable[[], object]] = {
        "compare": lambda: [bool((was != now).any()) for was, now in zip(old, new, strict=True)],
        "fetch": lambda: [piece.cpu() for piece in (*old, *new)],
    }
    for profile in Profile:
        there, here = (partial(_encoded, old, new, profile, on_device=on_device) for on_device in (True, False))
        if there() != here():
            raise RuntimeError(f"{profile}: other frames from the device than from the host")
        candidates |= {f"{profile}_there": there, f"{profile}_here": here}
    seconds = interleaved_medians(candidates, repeats=repeats)
    result: dict[str, object] = {
        f"compare_gb_s{suffix}": 2 * sum(piece.nbytes for piece in old) / seconds["compare"] / 1e9
    }
    for profile in Profile:
        result |= {
            f"{profile}_there_vs_here{suffix}": seconds[f"{profile}_here"] / seconds[f"{profile}_there"],
            f"{profile}_there_vs_compare{suffix}": seconds["compare"] / seconds[f"{profile}_there"],
        }
        if old[0].device.type != "cpu":
            result[f"{profile}_here_vs_fetch{suffix}"] = seconds["fetch"] / seconds[f"{profile}_here"]
    return result


def _encoded(old: Pieces, new: Pieces, profile: Profile, *, on_device: bool) -> list[EncodedFrame]:
    return [
        encode_where_they_are([was], [now], profile=profile, on_device=on_device)
        for was, now in zip(old, new, strict=True)
    ]
