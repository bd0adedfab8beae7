"""The torch twin of detection: the same payload, whatever the dtype; on a GPU where there is one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.delta import Base, publish_delta, read_manifest, weights_root
from rl_core.delta.codec import FrameMode, Profile, decode_frame, encode_frame
from rl_core.delta.device import apply_on_device, device_words, encode_where_they_are
from rl_core.delta.gaps import choose_threshold, sample_step
from rl_core.delta.words import DTYPES, words_of
from rl_core.errors import ModelError
from rl_core.store import open_store
from rl_core.types import VersionRef

DEVICES = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count())[:1])]


def pair(dtype, *, size, density, seed, spread=1.0):
    """Two tensors of words, of which about `density` differ. With a `spread` below 1, magnitudes are alike."""
    rng = np.random.default_rng(seed)
    old, new = (np.frombuffer(rng.bytes(size * dtype.itemsize), f"u{dtype.itemsize}").copy() for _ in range(2))
    if spread < 1:
        word = old.dtype
        old = (word.type(0x35) << word.type(8 * dtype.itemsize - 8)) + (old >> word.type(6))
        new = old + (new & word.type(1)) + word.type(1)
    new = np.where(rng.random(size) < density, new, old)
    if dtype is torch.bool:
        old, new = old % 2, new % 2
    return [torch.from_numpy(side.view(np.uint8)).view(dtype) for side in (old, new)]


def on(device, pieces):
    """Words of two bytes as tensors of a device."""
    return [torch.from_numpy(words.view(np.int16)).to(device) for words in pieces]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("profile", Profile)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.sampled_from([1, 2, 63, 64, 1000, 9000, 70_000]), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_the_device_writes_what_the_loops_write(profile, device, dtype, sizes, density, spread, seed):
    pairs = [pair(dtype, size=size, density=density, seed=seed + i, spread=spread) for i, size in enumerate(sizes)]
    host_old, host_new = ([words_of(sides[i]) for sides in pairs] for i in (0, 1))
    old, new = ([device_words(sides[i].to(device)) for sides in pairs] for i in (0, 1))
    expected = encode_frame(old=host_old, new=host_new, profile=profile)
    frame = encode_where_they_are(old, new, profile=profile, on_device=True)
    assert frame == expected == encode_where_they_are(old, new, profile=profile)
    patches = decode_frame(frame.mode, frame.payload, pieces=host_old)
    for patch, words, wanted in zip(patches, old, new, strict=True):
        held = words.clone()
        apply_on_device(patch, held)
        assert torch.equal(held, wanted)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("place", [0, 63])
def test_the_device_samples_what_the_loops_sample(device, place):
    """Nothing but one word of each sample is tiny, and all of these change."""
    sizes = (1_000_003, 2_000_000)
    of = sample_step(sum(sizes))
    old, new = ([np.full(size, 0x3F80, np.uint16) for size in sizes] for _ in range(2))
    for before, after in zip(old, new, strict=True):
        before[place::of], after[place::of] = 0x2000, 0x2001
    assert choose_threshold(old, new) > 0
    frame = encode_where_they_are(on(device, old), on(device, new), profile=Profile.FAST, on_device=True)
    assert frame == encode_frame(old=old, new=new, profile=Profile.FAST)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_magnitudes_of_old_words_are_what_the_device_codes_by(device):
    rng = np.random.default_rng(5)
    old = rng.integers(0x3C00, 0x3F80, 300_000, dtype=np.uint16)
    new = old + rng.choice(np.array([0, 1, 0x80, 0x100], np.uint16), old.size, p=[0.94, 0.03, 0.02, 0.01])
    frame = encode_where_they_are(on(device, [old]), on(device, [new]), profile=Profile.SMALL, on_device=True)
    assert frame.mode is FrameMode.HAZARD
    assert frame == encode_frame(old=[old], new=[new], profile=Profile.SMALL)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("profile", Profile)
def test_what_is_published_from_a_device_is_what_a_host_publishes(tmp_path, profile, device):
    sides = {
        "plain": pair(torch.bfloat16, size=60_000, density=0.01, seed=1, spread=0.1),
        "noise": pair(torch.float32, size=30_000, density=1.0, seed=2),
        "same": pair(torch.float16, size=5_000, density=0.0, seed=3),
        "none": pair(torch.uint8, size=0, density=0.0, seed=4),
    }
    old = {name: before for name, (before, _) in sides.items()}
    new = {name: after for name, (_, after) in sides.items()} | {"fresh": torch.arange(70, dtype=torch.float32)}
    base = Base("a:0-0", weights_root(old), "base")

    def publish(folder, where):
        store = open_store(tmp_path / folder)
        here = {side: {name: t.to(where) for name, t in held.items()} for side, held in (("old", old), ("new", new))}
        version, detect = VersionRef("a", 0, 1), folder == "device"
        made = publish_delta(store, **here, version=version, base=base, fence=1, profile=profile, on_device=detect)
        read_manifest(store, made.manifest_key)
        return made.root, {key: store.read(key) for key in sorted(o.key for o in store.list(""))}

    assert publish("device", device) == publish("host", torch.device("cpu"))


def test_whole_patches_go_to_the_device_too():
    words = np.arange(10, dtype=np.uint16)
    payload = encode_frame(old=None, new=[words])
    assert payload.mode is FrameMode.PLANES
    (patch,) = decode_frame(payload.mode, payload.payload, pieces=[np.zeros_like(words)])
    held = torch.zeros(10, dtype=torch.int16)
    apply_on_device(patch, held)
    assert held.tolist() == list(range(10))


def test_weights_with_gaps_in_memory_are_named():
    with pytest.raises(ModelError, match="contiguous"):
        device_words(torch.zeros(4, 4).T)
