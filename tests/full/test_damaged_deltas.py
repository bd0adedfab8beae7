"""Ten thousand damaged frames and ten thousand damaged stores: none crashes, hangs, balloons or is applied."""

import random
import shutil
import time
import tracemalloc

import numpy as np
import pytest
import torch

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, reconcile, weights_root
from rl_core.delta.codec import FrameMode, Profile, decode_frame, encode_frame
from rl_core.errors import DigestMismatch, RlCoreError
from rl_core.store import open_store
from rl_core.types import VersionRef

pytestmark = pytest.mark.full

DAMAGES = 10_000
WORDS = 20_000


def words_by_law(rng, word):
    """Old and new words of many magnitudes; the smaller, the likelier to have moved."""
    scale = 2.0 ** -rng.integers(0, 12, WORDS)
    old = (rng.standard_normal(WORDS) * scale).astype(np.float32).view(np.uint32) >> (32 - 8 * word.itemsize)
    old = old.astype(word)
    moved = rng.random(WORDS) < np.where(scale < 2e-3, 0.95, 0.02)
    return old, old + moved * rng.integers(1, 40, WORDS).astype(word)


def frames():
    """(mode, payload, old, new) of each mode that is written, and of several widths."""
    rng = np.random.default_rng(1)
    made = []
    for word in (np.dtype("u1"), np.dtype("u2"), np.dtype("u4")):
        old, new = words_by_law(rng, word)
        for profile in Profile:
            frame = encode_frame(old=[old], new=[new], profile=profile)
            made.append((frame.mode, bytes(frame.payload), old, new))
        whole = encode_frame(old=None, new=[new])
        made.append((whole.mode, bytes(whole.payload), old, new))
    return made


def damaged(data, others, rng):
    """Flipped bits, a cut, zeroes, or a splice with another container."""
    data = bytearray(data)
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.randrange(2, 20)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            del data[at:]
        case 3:
            data[at : at + rng.randrange(1, 64)] = bytes(rng.randrange(1, 64))
        case 4:
            other = rng.choice(others)
            data[at:] = other[rng.randrange(len(other)) :]
    return bytes(data)


def test_damaged_frames_are_refused_or_stay_within_their_words():
    """Digests stand before the decoder; behind them it is on its own here."""
    rng = random.Random(2)
    made = frames()
    assert {mode for mode, *_ in made} == {
        FrameMode.RAW, FrameMode.PLANES, FrameMode.RICE_ULP, FrameMode.HAZARD,
    }  # fmt: skip
    payloads = [payload for _, payload, *_ in made]
    for mode, payload, old, _ in made:
        decode_frame(mode, payload, pieces=[old])  # compiles, which takes more memory than is measured here
    refused, slowest, peak = 0, 0.0, 0
    tracemalloc.start()
    for number in range(DAMAGES):
        mode, payload, old, new = made[number % len(made)]
        backward = bool(mode.sparse and number // len(made) % 2)
        words = new if backward else old
        before = words.copy()
        hurt = damaged(payload, payloads, rng)
        tracemalloc.reset_peak()
        held, started = tracemalloc.get_traced_memory()[0], time.perf_counter()
        try:
            (patch,) = decode_frame(mode, hurt, pieces=[words], backward=backward)
        except DigestMismatch:
            refused += 1
        else:
            assert patch.values.size <= words.size
            if patch.positions is not None and patch.positions.size:
                assert 0 <= patch.positions.min() <= patch.positions.max() < words.size
        slowest = max(slowest, time.perf_counter() - started)
        peak = max(peak, tracemalloc.get_traced_memory()[1] - held)
        assert np.array_equal(words, before)
    tracemalloc.stop()
    shown = f"{refused} of {DAMAGES} refused; slowest {slowest * 1e3:.0f} ms, peak {peak / 1e6:.1f} MB"
    print(shown)  # noqa: T201 (drills tell)
    assert refused > DAMAGES // 2
    assert peak < 100 * 4 * WORDS


def test_damaged_stores_are_refused_and_nothing_is_applied(tmp_path):
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    old = {"a": torch.randn(3000, generator=generator).bfloat16(), "b": torch.randn(40, 9, generator=generator)}
    new = {name: (tensor.float() * 1.001).to(tensor.dtype) for name, tensor in old.items()}
    store = open_store(tmp_path / "whole")
    first = publish_snapshot(store, old, key_prefix="snapshots/x", version=VersionRef("x", 0, 0))
    base = Base("x:0-0", first.root, first.manifest_key)
    second = publish_delta(store, old=old, new=new, version=VersionRef("x", 0, 1), base=base, fence=1)
    shutil.copytree(tmp_path / "whole", tmp_path / "hurt")
    delta = tmp_path / "hurt" / "lineages"
    files = {path: path.read_bytes() for path in delta.rglob("*") if path.is_file()}
    hurt_store = open_store(tmp_path / "hurt")
    target = Target(version="x:0-1", root=second.root, manifest=second.manifest_key)
    shadow = ShadowWeights.from_tensors(old, version="x:0-0", manifest_key=first.manifest_key)
    same = 0
    for number in range(DAMAGES):
        path = list(files)[number % len(files)]
        hurt = damaged(files[path], list(files.values()), rng)
        if hurt == files[path]:
            same += 1
            continue
        path.write_bytes(hurt)
        with pytest.raises(RlCoreError):
            reconcile(hurt_store, shadow, target)
        assert not shadow.poisoned
        assert shadow.root == first.root
        path.write_bytes(files[path])
    assert same < DAMAGES // 10
    assert weights_root(shadow.tensors) == first.root
    reconcile(hurt_store, shadow, target)
    assert weights_root(shadow.tensors) == second.root
