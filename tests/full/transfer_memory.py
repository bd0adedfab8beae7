"""Measures what transfers hold in memory beyond the versions themselves: `transfer_memory.py THREADS`, one JSON line.

`publish_*` is beyond old and new weights; `receive_delta` beyond the copy that it changes in place; `receive_snapshot`
beyond that copy and the weights that are built beside it; `derive_*` beyond the weights and their base in the serving
format. Bytes; `full_bytes` is what the model has.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, reconcile, weights_root
from rl_core.formats import serving_copy, serving_weights_of
from rl_core.memory import copied, empty_tensor, give_blocks_back
from rl_core.store import ObjectStore, open_store
from rl_core.types import VersionRef, WeightFormat

TENSORS, ROWS, COLUMNS = 24, 2048, 2560  # 10 MiB each in bf16
DENSITY = 0.02
FORMATS = (WeightFormat.FP8_BLOCK, WeightFormat.NVFP4)


def make(seed: int) -> dict[str, torch.Tensor]:
    """Apart from the heap, which then has no holes of them that what is measured would fill."""
    generator, made = torch.Generator().manual_seed(seed), {}
    drawn = empty_tensor((ROWS, COLUMNS), torch.float32)
    for i in range(TENSORS):
        torch.randn(ROWS, COLUMNS, generator=generator, out=drawn)
        made[f"layers.{i:02}.up_proj.weight"] = empty_tensor(drawn.shape, torch.bfloat16).copy_(drawn.mul_(0.02))
    return made


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """About `DENSITY` of the elements one step further."""
    generator = torch.Generator().manual_seed(99)
    new = {}
    for name, tensor in weights.items():
        places = torch.randint(0, tensor.numel(), (int(tensor.numel() * DENSITY),), generator=generator)
        words = copied(tensor).view(torch.int16).flatten()
        words[places] += 1
        new[name] = words.view(torch.bfloat16).view_as(tensor)
    return new


def resident() -> int:
    """Bytes of memory that are not pages of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    told = {line[0]: int(line[1]) << 10 for line in lines if line[0].startswith("Rss")}
    return told["RssAnon:"] + told["RssShmem:"]


def peak_beyond(work: Callable[[], object]) -> int:
    """The most memory that was resident while `work` ran, over what was before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak - before, 0)


def measure(store: ObjectStore, *, threads: int) -> dict[str, int]:
    old, version = make(0), VersionRef("lin", 0, 1)
    new = changed(old)
    base = Base("lin:0-0", weights_root(old))
    found = {"full_bytes": sum(tensor.nbytes for tensor in old.values())}
    options = {"store": store, "version": version, "threads": threads}
    found["publish_delta"] = peak_beyond(
        lambda: publish_delta(old=old, new=new, base=base, fence=0, verify_base=False, **options)
    )
    found["publish_snapshot"] = peak_beyond(lambda: publish_snapshot(tensors=new, key_prefix="snapshots/x", **options))
    root = weights_root(new)
    new.clear()
    shadow = ShadowWeights.from_tensors(old, version="lin:0-0")
    delta = Target(version=str(version), root=root, manifest="lineages/lin/0-1/0/manifest.json")
    found["receive_delta"] = peak_beyond(lambda: reconcile(store, shadow, delta, threads=threads))
    assert shadow.root == root
    shadow.tensors.clear()
    found["receive_snapshot"] = receive_snapshot(store, old, root=root, threads=threads)
    old.clear()
    for weight_format in FORMATS:
        found[f"derive_{weight_format.value}"] = derive(weight_format, threads=threads)
    return found


def receive_snapshot(store: ObjectStore, old: dict[str, torch.Tensor], *, root: str, threads: int) -> int:
    stranger = ShadowWeights.from_tensors({name: tensor + 1 for name, tensor in old.items()})
    held = stranger.tensors  # what is here until the new weights are whole
    snapshot = Target(version="lin:0-1", root=root, manifest="snapshots/x/manifest.json")
    both = peak_beyond(lambda: reconcile(store, stranger, snapshot, threads=threads))
    assert len(held) == TENSORS
    return both - sum(tensor.nbytes for tensor in held.values())


def derive(weight_format: WeightFormat, *, threads: int) -> int:
    """What `workers.derive` does with a delta of a serving format."""
    give_blocks_back()
    moving, base_bytes = make(0), 0

    def work() -> None:
        nonlocal base_bytes
        old = serving_copy(moving, weight_format)
        base_bytes = sum(tensor.nbytes for tensor in old.values())
        base = Base("lin:0-0", weights_root(old))
        for tensor in moving.values():
            words = tensor.view(torch.int16).flatten()
            words[:: int(1 / DENSITY)] += 1
        with tempfile.TemporaryDirectory() as folder:
            publish_delta(
                open_store(folder), old=old, new=serving_weights_of(moving, weight_format), base=base,
                version=VersionRef("lin", 0, 1), fence=0, threads=threads, verify_base=False,
            )  # fmt: skip

    return peak_beyond(work) - base_bytes


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    threads = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        warm = {"w": torch.randn(200_000).bfloat16()}  # compiles, and starts what stays
        published = publish_delta(
            store, old=warm, new=changed(warm), version=VersionRef("warm", 0, 1), threads=threads, fence=0,
            base=Base("warm:0-0", weights_root(warm)),
        )  # fmt: skip
        target = Target(version="warm:0-1", root=published.root, manifest=published.manifest_key)
        reconcile(store, ShadowWeights.from_tensors(warm), target, threads=threads)
        for weight_format in FORMATS:
            tiny = {"w.up_proj.weight": torch.randn(256, 256).bfloat16()}
            old = serving_copy(tiny, weight_format)
            publish_delta(
                store, old=old, new=serving_weights_of(changed(tiny), weight_format), threads=threads, fence=0,
                version=VersionRef(weight_format.value, 0, 1), base=Base("w:0-0", weights_root(old)),
            )  # fmt: skip
        sys.stdout.write(json.dumps(measure(store, threads=threads)) + "\n")


if __name__ == "__main__":
    main()
