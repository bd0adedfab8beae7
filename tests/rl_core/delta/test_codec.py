import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from written_modes import WRITTEN, encode_pieces

from rl_core.delta import kernels
from rl_core.delta.codec import FrameMode, Profile, decode_frame, encode_frame
from rl_core.delta.frames import pieces_of, plan_frames
from rl_core.delta.gaps import extract, low_of
from rl_core.delta.magnitudes import BINS, count_changed, count_changed_bins
from rl_core.delta.rans import pack_numbers, read_numbers
from rl_core.delta.streams import StreamReader
from rl_core.delta.whole import encode_planes, encode_raw
from rl_core.delta.words import words_of
from rl_core.errors import DigestMismatch

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]
SHIPPED = {
    torch.bfloat16: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFF81, 0x0001, 0x807F, 0x3F80],
    torch.float16: [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x83FF, 0x3C00],
    torch.float32: [0x0000_0000, 0x8000_0000, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001, 0xFFC0_0000, 0x0000_0001],
    torch.float8_e4m3fn: [0x00, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x87],
    torch.float8_e5m2: [0x00, 0x80, 0x7C, 0xFC, 0x7D, 0x7F, 0xFE, 0x01, 0x83],
    torch.float8_e8m0fnu: [0x00, 0x01, 0x7F, 0xFE, 0xFF],
    torch.float4_e2m1fn_x2: [0x00, 0x80, 0x08, 0x77, 0xFF],
    torch.int8: [0x00, 0x80, 0x7F, 0xFF],
    torch.uint8: [0x00, 0x0F, 0xF0, 0xFF],  # packed int4 ships as bytes, too
}


def encode_as(mode, old, new, *, threshold=60):
    """One array in a mode of the caller's choice."""
    return encode_pieces(mode, [old], [new], threshold=threshold)


def cut(words, rng):
    """The same words in up to four pieces, copied so that each begins wherever memory does."""
    edges = np.sort(rng.integers(0, words.size + 1, 3))
    return [np.concatenate([words[:1], piece])[1:] for piece in np.split(words, edges) if piece.size]


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


@given(word_pairs(), st.sampled_from(list(Profile)))
@settings(max_examples=200, deadline=None)
def test_every_pair_survives_forwards_and_backwards(pair, profile):
    old, new = pair
    frame = encode_frame(old=[old], new=[new], profile=profile)
    assert frame.changes == np.count_nonzero(old != new)
    check_both_ways(frame.mode, frame.payload, old, new)


@given(word_pairs(), st.sampled_from(WRITTEN), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 60, 127]))
@settings(max_examples=300, deadline=None)
def test_every_mode_says_every_pair_however_it_is_cut(pair, mode, seed, threshold):
    old, new = pair
    if np.array_equal(old, new):
        new = new ^ (np.arange(new.size) == 0)
    old, new = old.copy(), new.astype(old.dtype)
    payload = encode_as(mode, old, new, threshold=threshold)
    check_both_ways(mode, payload, old, new, rng=np.random.default_rng(seed))


@st.composite
def tensor_pairs(draw):
    """Small models of one shipped dtype, old and new: its odd words among any, scalars and empty tensors too."""
    dtype = draw(st.sampled_from(list(SHIPPED)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.001, 0.05, 0.7, 1.0]))
    word = np.dtype(f"u{dtype.itemsize}")
    odd = np.array(SHIPPED[dtype], word)
    pairs = []
    for shape in draw(st.lists(st.sampled_from([(), (0,), (1,), (3, 0), (7, 5), (300,), (64, 129)]), min_size=1)):
        size = int(np.prod(shape, dtype=int))
        sides = [np.frombuffer(rng.bytes(size * dtype.itemsize), word).copy() for _ in range(2)]
        for side in sides:
            side[rng.random(size) < 0.3] = rng.choice(odd)
        sides[1] = np.where(rng.random(size) < density, sides[1], sides[0])
        pairs.append([torch.from_numpy(side.copy()).view(dtype).reshape(shape) for side in sides])
    return pairs


@given(tensor_pairs(), st.sampled_from(list(Profile)))
@settings(max_examples=200, deadline=None)
def test_every_dtype_that_ships_keeps_every_bit(pairs, profile):
    old, new = ([words_of(pair[side]) for pair in pairs] for side in (0, 1))
    held = [words.copy() for words in old]
    for ranges in plan_frames(((i, "", words.size, words.itemsize) for i, words in enumerate(old)), frame_bytes=4096):
        frame = encode_frame(old=pieces_of(ranges, old), new=pieces_of(ranges, new), profile=profile)
        pieces = pieces_of(ranges, held)
        for patch, words in zip(decode_frame(frame.mode, frame.payload, pieces=pieces), pieces, strict=True):
            patch.apply(words)
    assert [words.tobytes() for words in held] == [words.tobytes() for words in new]


def check_both_ways(mode, payload, old, new, rng=None):
    """Old words become new; a sparse patch, read from the new words, gives the old ones; reading changes nothing."""
    pieces = [old.copy()] if rng is None else cut(old, rng)
    before = np.concatenate(pieces)
    for patch, words in zip(decode_frame(mode, payload, pieces=pieces), pieces, strict=True):
        patch.apply(words)
    assert np.concatenate(pieces).tobytes() == new.tobytes()
    if mode.sparse:
        patches = decode_frame(mode, payload, pieces=pieces, backward=True)
        assert np.concatenate(pieces).tobytes() == new.tobytes()
        for patch, words in zip(patches, pieces, strict=True):
            patch.revert(words)
        assert np.concatenate(pieces).tobytes() == before.tobytes()


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), min_size=1, max_size=50))
@example([(0x0000, 0x8000)])  # +0 → −0, equal as floats
@example([(0x7FC0, 0x7FC1), (0xFFC0, 0x7FC0)])  # NaN payloads and signs
@example([(0x7F80, 0xFF80), (0x7F7F, 0x7F80)])  # infinities
@example([(0x3F80, 0x3F7F), (0x3F7F, 0x3F80), (0x3F80, 0x3F80)])  # over a binade and back
@settings(deadline=None)
def test_patches_keep_every_bit_of_bf16(pairs):
    old, new = (np.array(side, np.uint16) for side in zip(*pairs, strict=True))
    check_both_ways(FrameMode.RICE_ULP, encode_as(FrameMode.RICE_ULP, old, new, threshold=120), old, new)
    if not np.array_equal(old, new):
        check_both_ways(FrameMode.HAZARD, encode_as(FrameMode.HAZARD, old, new), old, new)


@pytest.mark.parametrize("profile", list(Profile))
def test_pieces_are_laid_end_to_end(profile):
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[0, 9, 10, 999]] += np.array([1, 65535, 300, 5000], np.uint16)
    cuts = [0, 10, 11, 600, 1000]
    split = encode_frame(
        old=[old[a:b] for a, b in itertools.pairwise(cuts)],
        new=[new[a:b] for a, b in itertools.pairwise(cuts)],
        profile=profile,
    )
    assert split.payload == encode_frame(old=[old], new=[new], profile=profile).payload


def test_sparse_changes_cost_what_their_entropy_says():
    rng = np.random.default_rng(1)
    for density in (0.0005, 0.003, 0.02, 0.1):
        old = rng.integers(0, 65536, 2_000_000, dtype=np.uint16)
        new = old.copy()
        changed = rng.random(old.size) < density
        new[changed] += np.where(rng.random(int(changed.sum())) < 0.5, 1, 65535).astype(np.uint16)
        bound = old.size * -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / 8 + changed.sum() / 8
        frame = encode_frame(old=[old], new=[new], profile=Profile.FAST)
        assert frame.mode is FrameMode.RICE_ULP
        assert len(frame.payload) < 1.09 * bound


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_knowing_the_old_magnitude_pays(lr):
    """Changes that follow the law of training: within a fifth of their entropy given the old exponent."""
    rng = np.random.default_rng(4)
    values = (rng.standard_normal(2_000_000) * 0.05).astype(np.float32)
    old = (values.view(np.uint32) >> 16).astype(np.uint16)
    exponents = ((old >> 7) & 0xFF).astype(int)
    chance = np.minimum(1.0, lr * 0.8 * 2.0 ** (7 - (exponents - 127)))
    changed = rng.random(old.size) < chance
    new = old.copy()
    new[changed] += np.where(rng.random(int(changed.sum())) < 0.5, 1, 65535).astype(np.uint16)
    bits = float(changed.sum())  # which way
    for exponent in np.unique(exponents):
        share = float(changed[exponents == exponent].mean())
        if 0 < share < 1:
            entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
            bits += entropy * np.count_nonzero(exponents == exponent)
    frame = encode_frame(old=[old], new=[new])
    assert frame.mode is FrameMode.HAZARD
    assert len(frame.payload) < 1.1 * bits / 8
    plain = len(encode_as(FrameMode.RICE_ULP, old, new, threshold=0))
    assert len(frame.payload) < 0.85 * plain
    assert len(encode_frame(old=[old], new=[new], profile=Profile.FAST).payload) == plain, "to look for them costs time"


def test_whole_words_are_taken_where_they_are_smaller():
    rng = np.random.default_rng(2)
    old = rng.integers(0, 65536, 10_000, dtype=np.uint16)
    assert encode_frame(old=[old], new=[np.zeros_like(old)]).mode is FrameMode.PLANES
    assert encode_frame(old=None, new=[old]).mode is FrameMode.PLANES
    assert encode_frame(old=[old[:-1]], new=[old]).mode is FrameMode.PLANES
    assert encode_frame(old=None, new=[old.astype(np.uint8)]).mode is FrameMode.RAW


def test_byte_planes_shrink_weights_more_than_bytes_in_a_row():
    values = (np.random.default_rng(3).standard_normal(500_000) * 0.05).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    planes, raw = len(encode_planes([words])), len(encode_raw([words]))
    assert planes < 0.93 * raw
    assert planes < 0.72 * words.nbytes


@pytest.mark.parametrize("mode", [FrameMode.RAW, FrameMode.PLANES])
def test_a_whole_patch_cannot_be_taken_back(mode):
    words = np.arange(10, dtype=np.uint16)
    (patch,) = decode_frame(mode, encode_as(mode, words, words), pieces=[words])
    with pytest.raises(TypeError):
        patch.revert(words)


def damaged_pair():
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 5000, dtype=np.uint16)
    new = old.copy()
    new[::40] += 1
    new[::400] += 4000
    return old, new


@pytest.mark.parametrize("mode", WRITTEN)
@pytest.mark.parametrize("backward", [False, True])
def test_damaged_payloads_are_refused_or_decode_within_bounds(mode, backward):
    """Digests catch damage first; behind them a decoder must neither crash, nor write outside, nor balloon."""
    rng = np.random.default_rng(3)
    old, new = damaged_pair()
    words = new if backward else old
    payload = encode_as(mode, old, new)
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1 << int(rng.integers(8))
        before = words.copy()
        try:
            (patch,) = decode_frame(mode, bytes(damaged), pieces=[words], backward=backward)
        except DigestMismatch:
            continue
        finally:
            assert np.array_equal(words, before)
        assert patch.values.size <= old.size
        if patch.positions is not None and patch.positions.size:
            assert 0 <= patch.positions.min() <= patch.positions.max() < old.size


@pytest.mark.parametrize("mode", WRITTEN)
def test_cut_and_lengthened_payloads_are_refused(mode):
    old = np.arange(3000, dtype=np.uint16)
    payload = encode_as(mode, old, old ^ (old % 7 == 0))
    for damaged in (*(payload[:end] for end in range(0, len(payload), 3)), payload + b"\0"):
        with pytest.raises(DigestMismatch):
            decode_frame(mode, damaged, pieces=[old])


def test_words_near_zero_that_all_move_cost_no_places():
    """Of a frame where the smallest words move at every step, the fast profile says what each did, not where it is."""
    rng = np.random.default_rng(5)
    old = rng.integers(0x3C00, 0x3F80, 400_000, dtype=np.uint16)
    small = rng.random(old.size) < 0.02
    old[small] -= 0x1000
    new = old + (small * rng.integers(1, 5, old.size)).astype(np.uint16)
    frame = encode_frame(old=[old], new=[new], profile=Profile.FAST)
    assert frame.mode is FrameMode.RICE_ULP
    assert len(frame.payload) < 0.5 * len(encode_as(FrameMode.RICE_ULP, old, new, threshold=0))
    check_both_ways(frame.mode, frame.payload, old, new)


@pytest.mark.parametrize("word", WIDTHS)
def test_steps_of_every_size_split_and_join(word):
    full = int(np.iinfo(word).max)
    edges = [1, 2, 7, 8, 9, 134, 135, 136, 137, full >> 1, (full >> 1) + 1, full - 1, full]
    steps = np.array([step for step in edges if step <= full], word)
    pairs, escapes, words = kernels.split_differences(steps)
    joined = np.empty_like(steps)
    assert kernels.join_differences(pairs, escapes, words, joined)
    assert joined.tolist() == steps.tolist()
    assert not kernels.join_differences(pairs, escapes[:-1], words, joined)
    numbers = kernels.numbers_of(steps)
    assert numbers[:2].tolist() == [2, 4]
    assert kernels.differences_of(numbers, joined)
    assert joined.tolist() == steps.tolist()


@pytest.mark.parametrize("word", WIDTHS)
@pytest.mark.parametrize("low_bits", [0, 3, 8, 21])
def test_gaps_and_steps_of_every_size_are_written_and_read(word, low_bits):
    full, longest = int(np.iinfo(word).max), 14 << low_bits | (1 << low_bits) - 1
    edges = [1, 7, 8, 9, 134, 135, 136, full >> 1, (full >> 1) + 1, full - 8, full - 7, full - 1, full]
    steps = np.array([step for step in edges if step <= full], word)
    gaps = np.resize([0, 1, longest - 1, longest, min(longest + 1, 1 << 23), 1 << 20], steps.size)
    positions = (np.cumsum(gaps + 1) - 1).astype(np.int32)
    streams = kernels.write_changes(positions, steps, low_bits)
    low, symbols, far, near, words = streams
    assert far.size == np.count_nonzero(gaps > longest)
    found, joined, size = np.empty_like(positions), np.empty_like(steps), int(positions[-1]) + 1

    def read(low, symbols, far, near, words, *, size=size):
        return kernels.read_changes(
            low, low_bits, symbols, far, near, words, size=size, positions=found, differences=joined
        )

    assert read(*streams)
    assert found.tolist() == positions.tolist()
    assert joined.tolist() == steps.tolist()
    assert not read(*streams, size=size - 1)
    assert not read(low, symbols, far, near[:-1], words)
    assert not read(low, symbols, np.append(far, far[:1] if far.size else np.uint32(1)), near, words)
    if words.size:
        assert not read(low, symbols, far, near, words[:-1])


@pytest.mark.parametrize("sizes", [[1], [63, 65], [64, 128, 1], [65_535, 1, 65_537], [200_000, 70_000]])
@pytest.mark.parametrize("density", [0.0, 0.003, 0.7, 1.0])
def test_all_changes_are_found_wherever_stretches_end(sizes, density):
    """Among them more than there was room for at first."""
    rng = np.random.default_rng(7)
    old = [rng.integers(0, 65536, size, dtype=np.uint16) for size in sizes]
    new = [words + (rng.random(words.size) < density).astype(np.uint16) * np.uint16(3) for words in old]
    new[-1][-1] += 1
    changes = extract(old, new).changes
    before, after = np.concatenate(old), np.concatenate(new)
    assert changes.positions.tolist() == np.flatnonzero(before != after).tolist()
    assert changes.differences.tolist() == (after - before)[changes.positions].tolist()


@pytest.mark.parametrize("word", WIDTHS)
@pytest.mark.parametrize("sizes", [[1], [63, 65], [4096], [4097, 12_295], [61_439, 4_159], [70_000, 5, 80_001]])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.9, 1.0])
def test_tiny_words_are_told_apart_wherever_stretches_end(word, sizes, share):
    """Among them more than there was room for at first, and so many that what is left of it is just too short."""
    rng, low, sign = np.random.default_rng(7), low_of(100, np.dtype(word)), 1 << (8 * np.dtype(word).itemsize - 1)
    old = np.where(rng.random(sum(sizes)) < share, word(low - 1), word(low + 9))
    old |= word(sign) * rng.integers(0, 2, old.size).astype(word)
    steps = rng.choice(np.array([0, 0, -9, 1, 9]).astype(word), old.size)
    new, ends = old + steps, np.cumsum(sizes)[:-1]
    found = extract(np.split(old, ends), np.split(new, ends), threshold=100)
    tiny, still = ((words & word(sign - 1)) < low for words in (old, new))
    stepped = tiny & still & (steps != 0)
    listed = (steps != 0) & ~stepped
    assert found.changes.positions.tolist() == np.flatnonzero(listed).tolist()
    assert found.changes.differences.tolist() == steps[listed].tolist()
    assert found.flags.tolist() == stepped[tiny].tolist()
    assert found.small.tolist() == steps[stepped].tolist()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 64 * 9 + 7])
def test_a_sample_counts_the_changes_that_its_bins_count(size):
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, size, dtype=np.uint16)
    new = old + (rng.random(size) < 0.4).astype(np.uint16)
    new[-1] += 5
    for of in (64, 192, 576):
        words, changed = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        count_changed_bins(old, new, of, words, changed)
        assert count_changed(old, new, of) == changed.sum() > 0


def test_numbers_in_a_context_without_a_table_are_refused():
    contexts = np.array([0, 1, 0, 1], np.uint8)
    packed = pack_numbers(np.array([1, 2, 3, 4], np.uint64), contexts, kinds=2, bits=16)
    read = partial(read_numbers, kinds=2, bits=16)
    assert read(StreamReader(packed, limit_bytes=4096), contexts).tolist() == [1, 2, 3, 4]
    only_first = pack_numbers(np.array([1, 2], np.uint64), contexts[::2], kinds=2, bits=16)
    with pytest.raises(DigestMismatch, match="leave out"):
        read(StreamReader(only_first, limit_bytes=4096), contexts)


def test_a_lone_change_of_a_very_long_frame_is_read():
    old = np.zeros(1 << 26, np.uint8)
    new = old.copy()
    new[-1] = 1
    frame = encode_frame(old=[old], new=[new], profile=Profile.FAST)
    (patch,) = decode_frame(frame.mode, frame.payload, pieces=[old])
    assert patch.positions is not None
    assert patch.positions.tolist() == [old.size - 1]


def test_bytes_from_wherever_are_read_by_one_compiled_loop():
    """To compile takes a second, in which an engine decodes no token."""
    rng = np.random.default_rng(8)
    for size in (3, 50, 4000, 60_001):
        old = rng.integers(0, 65536, 3 * size, dtype=np.uint16)
        new = old.copy()
        new[::3] += rng.integers(1, 40_000, size, dtype=np.uint16)
        payload = encode_as(FrameMode.RICE_ULP, old, new, threshold=0)
        for held in (payload, memoryview(bytearray(payload)), memoryview(b"-" + payload)[1:]):
            (patch,) = decode_frame(FrameMode.RICE_ULP, held, pieces=[old])
            assert patch.values.tolist() == (new - old)[::3].tolist()
    for low, _, symbols, far, near, words, *_ in kernels._read_changes.signatures:
        assert len({stream.mutable for stream in (low, symbols, far, near, words)}) == 1
