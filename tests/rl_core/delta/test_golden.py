"""Every format that was ever published must decode for ever. `golden/framesN` is a store written by codec `frames/N`.

To add a codec: `python tests/rl_core/delta/test_golden.py golden/framesN` once, and commit it. Never rewrite an
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
from rl_core.delta.codec import CODEC_VERSION, FrameMode, Profile
from rl_core.store import open_store
from rl_core.types import VersionRef

GOLDEN = Path(__file__).with_name("golden")
WHOLE = {FrameMode.RAW, FrameMode.PLANES}
MODES = {
    "frames1": {FrameMode.RAW, FrameMode.GAP_ULP},
    "frames2": WHOLE | {FrameMode.GAP_ULP, FrameMode.CLASS_GAP_ULP},
    "frames3": WHOLE | {FrameMode.TINY_GAP_ULP, FrameMode.HAZARD},
    "frames4": WHOLE | {FrameMode.RICE_ULP, FrameMode.HAZARD},
}
CODECS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []


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
    if number >= 4:
        made["law.f32"] = law(number).view(torch.float32)
    return made


def law(number: int) -> torch.Tensor:
    """Words of many magnitudes; in versions 5 and 7 the small ones have moved by one step, in version 6 all are others.

    Version 8 has moved the smallest.
    """
    scattered = torch.arange(20_000, dtype=torch.int64) * 2_654_435_761 % 2**32
    words = 0x3C00 - (scattered >> 20) % 8 * 128 * (scattered >> 9) % 0x0800 + scattered % 128
    moved = (scattered >> 13) % 997 < 1000 >> ((words >> 7) - 0x68).clamp(0, 20)
    stepped = (words << 16) + moved * (1 - (scattered >> 11) % 2 * 2)
    others = scattered % 0x7000_0000
    return {4: words << 16, 5: stepped, 6: others, 7: stepped, 8: stepped + moved}[number].to(torch.int32)


def write(folder: Path) -> None:
    """Publish versions 0 to 8; 3, 4, 6 and 7 bring whole tensors, the others apply backwards too."""
    store = open_store(folder)
    published = [publish_snapshot(store, weights(0), key_prefix="snapshots/golden", version=VersionRef("golden", 0, 0))]
    for number in range(1, 9):
        base = Base(f"golden:0-{number - 1}", published[-1].root, published[-1].manifest_key)
        version = VersionRef("golden", 0, number)
        old, new = weights(number - 1), weights(number)
        profile = Profile.FAST if number in (2, 8) else Profile.SMALL
        published.append(publish_delta(store, old=old, new=new, version=version, base=base, fence=7, profile=profile))
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


def test_the_current_codec_has_its_golden_files():
    assert CODECS[-1] == CODEC_VERSION.replace("/", "")
    assert [f"frames{number}" for number in range(1, len(CODECS) + 1)] == CODECS
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 50_000 * len(CODECS)


@pytest.mark.parametrize("name", CODECS)
def test_golden_files_decode(name, tmp_path):
    store, targets = opened(name, tmp_path)
    shadow = ShadowWeights.from_tensors({"other": torch.ones(3)})
    for number in (0, 1, 2, 1, 0, 3, 2, *range(3, len(targets)), *reversed(range(4, len(targets)))):
        reconcile(store, shadow, targets[number])
        assert shadow.root == weights_root(weights(number)) == targets[number].root


@pytest.mark.parametrize("name", CODECS)
def test_golden_files_hold_every_mode_and_direction(name, tmp_path):
    store, targets = opened(name, tmp_path)
    manifests = [read_manifest(store, target.manifest) for target in targets]
    modes = {frame.mode for manifest in manifests[1:] for frame in manifest.frames}
    assert modes == MODES[name]
    reversible = [False, True, True, False, False, True, False, False, True]
    assert [manifest.reversible for manifest in manifests] == reversible[: len(manifests)]
    shadow = ShadowWeights.from_tensors(weights(2), manifest_key=targets[2].manifest)
    assert [hop.kind for hop in reconcile(store, shadow, targets[0]).hops] == [HopKind.BACKWARD] * 2


if __name__ == "__main__":
    write(Path(__file__).parent / sys.argv[1])
