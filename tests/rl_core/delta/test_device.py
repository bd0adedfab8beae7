"""The torch twin of detection, on the CPU: the same words found, the same payload, whatever the dtype."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.delta.codec import FrameMode, Profile, decode_frame, encode_frame
from rl_core.delta.device import apply_on_device, device_words, encode_on_device, extract_on_device
from rl_core.delta.gaps import choose_threshold, extract, pack_extracted
from rl_core.delta.words import DTYPES, words_of
from rl_core.errors import ModelError


def pair(dtype, *, size, density, seed):
    """Two tensors of random words, of which about `density` differ."""
    rng = np.random.default_rng(seed)
    old, new = (np.frombuffer(rng.bytes(size * dtype.itemsize), f"u{dtype.itemsize}").copy() for _ in range(2))
    new = np.where(rng.random(size) < density, new, old)
    if dtype is torch.bool:
        old, new = old % 2, new % 2
    return [torch.from_numpy(side.view(np.uint8)).view(dtype) for side in (old, new)]


@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.sampled_from([1, 2, 63, 1000, 9000]), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0, 1, 60, 128]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_the_device_finds_what_the_loops_find(dtype, sizes, density, threshold, seed):
    pairs = [pair(dtype, size=size, density=density, seed=seed + i) for i, size in enumerate(sizes)]
    host_old, host_new = ([words_of(sides[i]) for sides in pairs] for i in (0, 1))
    old, new = ([device_words(sides[i]) for sides in pairs] for i in (0, 1))
    found, expected = (
        extract_on_device(old, new, threshold=threshold),
        extract(host_old, host_new, threshold=threshold),
    )
    assert (
        found.count == expected.count == sum(np.count_nonzero(a != b) for a, b in zip(host_old, host_new, strict=True))
    )
    assert pack_extracted(found, sum(sizes)) == pack_extracted(expected, sum(sizes))
    frame = encode_on_device(old, new, threshold=threshold)
    held = [words.copy() for words in host_old]
    for patch, words in zip(decode_frame(frame.mode, frame.payload, pieces=held), held, strict=True):
        apply_on_device(patch, torch.from_numpy(words.view(f"i{words.itemsize}")))
    assert [words.tobytes() for words in held] == [words.tobytes() for words in host_new]


def test_a_frame_from_the_device_is_the_fast_profiles_frame():
    rng = np.random.default_rng(5)
    words = rng.integers(0x3C00, 0x3F80, 100_000, dtype=np.uint16)
    small = rng.random(words.size) < 0.02
    words[small] -= 0x1000
    stepped = words + small.astype(np.uint16)
    threshold = choose_threshold([words], [stepped])
    assert threshold > 0
    old, new = (torch.from_numpy(side.view(np.int16)).view(torch.bfloat16) for side in (words, stepped))
    frame = encode_on_device([device_words(old)], [device_words(new)], threshold=threshold)
    assert frame == encode_frame(old=[words], new=[stepped], profile=Profile.FAST)


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
