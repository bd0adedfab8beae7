"""Every format that was ever published must decode for ever. `golden/formatN` is a store written by format N.

To add a format: `python tests/rl_core/delta/test_golden.py golden/formatN` once, and commit it. Never rewrite an
older one; a failure here means that weights in customers' stores can no longer be read.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from rl_core.delta import (
    Base,
    HopKind,
    ShadowWeights,
    Target,
    publish_delta,
    publish_snapshot,
    read_manifest,
    reconcile,
    weights_root,
)
from rl_core.delta.codec import FrameMode
from rl_core.delta.manifest import FORMAT
from rl_core.store import open_store
from rl_core.types import VersionRef

GOLDEN = Path(__file__).with_name("golden")
FORMATS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []


def weights(number: int) -> dict[str, torch.Tensor]:
    """Made by integer arithmetic alone, so that they are the same under every version of torch."""
    ramp = torch.arange(3000, dtype=torch.int32)
    wild = (ramp * 40503 % 65536).to(torch.int16)
    made = {
        "dense.bf16": (wild + (ramp % 3 == 0) * number).to(torch.int16).view(torch.bfloat16).reshape(60, 50),
        "wild.f16": (wild + (ramp % 40 == 0) * number * (ramp % 1000)).to(torch.int16).view(torch.float16),
        "sparse.f32": torch.zeros(5000, dtype=torch.int32).view(torch.float32),
        "words.i64": torch.arange(50, dtype=torch.int64) * 40503,
        "bytes.f8": (torch.arange(200) % 100 + number).to(torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
    }
    made["sparse.f32"].view(torch.int32)[[4, 4999]] += number
    made["words.i64"][7] += number << 40
    signs = made["dense.bf16"].view(torch.int16).reshape(-1)[:2]
    signs[0], signs[1] = (-0x8000, 0x7FC1) if number % 2 else (0, 0x7FC0)  # −0 and +0, two NaN payloads
    if number == 3:
        made["new.bool"] = torch.arange(9) % 2 == 0
        del made["words.i64"]
    return made


def write(folder: Path) -> None:
    """Publish versions 0 to 3; 3 is a raw delta, the others apply backwards too."""
    store = open_store(folder)
    published = [publish_snapshot(store, weights(0), key_prefix="snapshots/golden", version=VersionRef("golden", 0, 0))]
    for number in range(1, 4):
        base = Base(f"golden:0-{number - 1}", published[-1].root, published[-1].manifest_key)
        version = VersionRef("golden", 0, number)
        old, new = weights(number - 1), weights(number)
        published.append(publish_delta(store, old=old, new=new, version=version, base=base, fence=7))
    versions = [{"root": one.root, "manifest": one.manifest_key} for one in published]
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def opened(name: str, tmp_path: Path):
    shutil.copytree(GOLDEN / name, tmp_path / name)
    versions = json.loads((tmp_path / name / "versions.json").read_text())
    targets = [
        Target(version=f"golden:0-{number}", root=one["root"], manifest=one["manifest"])
        for number, one in enumerate(versions)
    ]
    return open_store(tmp_path / name), targets


def test_the_current_format_has_its_golden_files():
    assert [f"format{number}" for number in range(1, FORMAT + 1)] == FORMATS
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 50_000 * len(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_golden_files_decode(name, tmp_path):
    store, targets = opened(name, tmp_path)
    shadow = ShadowWeights.from_tensors({"other": torch.ones(3)})
    for number in (0, 1, 2, 1, 0, 3, 2):
        reconcile(store, shadow, targets[number])
        assert shadow.root == weights_root(weights(number)) == targets[number].root


@pytest.mark.parametrize("name", FORMATS)
def test_golden_files_hold_every_mode_and_direction(name, tmp_path):
    store, targets = opened(name, tmp_path)
    manifests = [read_manifest(store, target.manifest) for target in targets]
    modes = {frame.mode for manifest in manifests[1:] for frame in manifest.frames}
    assert modes == set(FrameMode)
    assert [manifest.reversible for manifest in manifests] == [False, True, True, False]
    shadow = ShadowWeights.from_tensors(weights(2), manifest_key=targets[2].manifest)
    assert [hop.kind for hop in reconcile(store, shadow, targets[0]).hops] == [HopKind.BACKWARD] * 2


if __name__ == "__main__":
    write(Path(__file__).parent / sys.argv[1])
