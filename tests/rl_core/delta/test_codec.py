import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_core.delta.codec import CODECS, FrameMode, decode_frame, encode_frame
from rl_core.errors import DigestMismatch

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


@st.composite
def word_pairs(draw):
    """Pairs of word arrays of any width, changed anywhere from nowhere to everywhere, by anything."""
    dtype = np.dtype(draw(st.sampled_from(WIDTHS)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1, 2, 3, 255, 256, 257, 1000, 70_000]))
    density = draw(st.sampled_from([0.0, 1e-4, 0.003, 0.02, 0.3, 1.0]))
    reach = draw(st.sampled_from([1, 8, 300, 2**63]))
    old = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()
    new = old.copy()
    changed = rng.random(size) < density
    new[changed] += rng.integers(-reach, reach, int(changed.sum()), dtype=np.int64, endpoint=reach < 2**63).astype(
        dtype
    )
    return old, new


@given(word_pairs())
@settings(max_examples=150, deadline=None)
def test_every_pair_survives_forwards_and_backwards(pair):
    old, new = pair
    frame = encode_frame(old=[old], new=[new])
    assert frame.changes == np.count_nonzero(old != new)
    patch = decode_frame(frame.mode, frame.payload, dtype=old.dtype, count=old.size)
    words = old.copy()
    patch.apply(words)
    assert np.array_equal(words, new)
    if CODECS[frame.mode].reversible:
        patch.revert(words)
        assert np.array_equal(words, old)


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), min_size=1, max_size=50))
@example([(0x0000, 0x8000)])  # +0 → −0, equal as floats
@example([(0x7FC0, 0x7FC1), (0xFFC0, 0x7FC0)])  # NaN payloads and signs
@example([(0x7F80, 0xFF80), (0x7F7F, 0x7F80)])  # infinities
@settings(deadline=None)
def test_gap_ulp_keeps_every_bit_of_bf16(pairs):
    old, new = (np.array(side, np.uint16) for side in zip(*pairs, strict=True))
    codec = CODECS[FrameMode.GAP_ULP]
    payload = codec.encode(old=[old], new=[new])
    patch = codec.decode(payload, dtype=old.dtype, count=old.size)
    words = old.copy()
    patch.apply(words)
    assert words.tobytes() == new.tobytes()
    patch.revert(words)
    assert words.tobytes() == old.tobytes()


def test_pieces_are_laid_end_to_end():
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[0, 9, 10, 999]] += np.array([1, 65535, 300, 5000], np.uint16)
    cuts = [0, 10, 11, 600, 1000]
    split = encode_frame(
        old=[old[a:b] for a, b in itertools.pairwise(cuts)],
        new=[new[a:b] for a, b in itertools.pairwise(cuts)],
    )
    assert split.payload == encode_frame(old=[old], new=[new]).payload


def test_sparse_changes_cost_what_their_entropy_says():
    rng = np.random.default_rng(1)
    for density in (0.0005, 0.003, 0.02, 0.1):
        old = rng.integers(0, 65536, 2_000_000, dtype=np.uint16)
        new = old.copy()
        changed = rng.random(old.size) < density
        new[changed] += np.where(rng.random(int(changed.sum())) < 0.5, 1, 65535).astype(np.uint16)
        bound = old.size * -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / 8 + changed.sum() / 8
        frame = encode_frame(old=[old], new=[new])
        assert frame.mode is FrameMode.GAP_ULP
        assert len(frame.payload) < 1.09 * bound


def test_raw_is_chosen_where_it_is_smaller():
    rng = np.random.default_rng(2)
    old = rng.integers(0, 65536, 10_000, dtype=np.uint16)
    assert encode_frame(old=[old], new=[np.zeros_like(old)]).mode is FrameMode.RAW
    assert encode_frame(old=None, new=[old]).mode is FrameMode.RAW
    assert encode_frame(old=[old[:-1]], new=[old]).mode is FrameMode.RAW


def test_a_raw_patch_cannot_be_taken_back():
    words = np.arange(10, dtype=np.uint16)
    frame = encode_frame(old=None, new=[words])
    patch = decode_frame(frame.mode, frame.payload, dtype=words.dtype, count=10)
    with pytest.raises(TypeError):
        patch.revert(words)


@pytest.mark.parametrize("mode", list(FrameMode))
def test_damaged_payloads_are_refused_or_decode_within_bounds(mode):
    """Digests catch damage first; behind them a decoder must neither crash, nor write outside, nor balloon."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 5000, dtype=np.uint16)
    new = old.copy()
    new[::40] += 1
    new[::400] += 4000
    payload = CODECS[mode].encode(old=[old], new=[new])
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            patch = decode_frame(mode, bytes(damaged), dtype=old.dtype, count=old.size)
        except DigestMismatch:
            continue
        patch.apply(old.copy())
        assert patch.values.size <= old.size
        assert patch.positions is None or patch.positions.size == 0 or patch.positions.min() >= 0


@pytest.mark.parametrize("mode", list(FrameMode))
def test_cut_and_lengthened_payloads_are_refused(mode):
    old = np.arange(3000, dtype=np.uint16)
    payload = CODECS[mode].encode(old=[old], new=[old ^ (old % 7 == 0)])
    for damaged in (*(payload[:end] for end in range(0, len(payload), 3)), payload + b"\0"):
        with pytest.raises(DigestMismatch):
            decode_frame(mode, damaged, dtype=old.dtype, count=old.size)
