"""The profile that is there first over the slowest link."""

import json
from pathlib import Path

import pytest

from rl_core.links import FAST_BYTES, FAST_DECODE, FAST_ENCODE, Link, Shipped, as_if, choose_profile
from rl_core.types import Profile

SHIPPED = Shipped(profile=Profile.SMALL, bytes=1e9, encode_s=4.0, decode_s=2.0)


def test_small_until_something_was_measured():
    link = Link(cluster="east", bytes_per_s=1e12)
    for shipped, over in ((None, link), (SHIPPED, None), (None, None)):
        assert choose_profile(shipped, over).profile is Profile.SMALL


def test_the_sooner_one_is_taken_and_the_reason_counts_it_out():
    """1.3 GB are carried while `small` is encoded: even at 1.3e9 / 4 bytes a second."""
    even = 1e9 * FAST_BYTES / 4
    slow = choose_profile(SHIPPED, Link(cluster="east", bytes_per_s=even * 0.99))
    quick = choose_profile(SHIPPED, Link(cluster="east", bytes_per_s=even * 1.01))
    assert (slow.profile, quick.profile) == (Profile.SMALL, Profile.FAST)
    assert choose_profile(SHIPPED, Link(cluster="east", bytes_per_s=1e7)).reason == (
        "100 s at 10 MB/s to east; fast takes 130 s"
    )


@pytest.mark.parametrize(
    ("upload_s", "where"), [(0.0, "10 MB/s to east"), (1.0, "10 MB/s to east"), (1e3, "1 MB/s to the store")]
)
def test_the_trainers_own_link_counts_where_it_is_slower(upload_s, where):
    shipped = Shipped(profile=Profile.SMALL, bytes=1e9, encode_s=4.0, decode_s=2.0, upload_s=upload_s)
    assert where in choose_profile(shipped, Link(cluster="east", bytes_per_s=1e7)).reason


def test_a_slow_way_to_the_store_asks_for_few_bytes():
    quick = Link(cluster="east", bytes_per_s=1e12)
    assert choose_profile(SHIPPED, quick).profile is Profile.FAST
    slow = Shipped(profile=Profile.SMALL, bytes=1e9, encode_s=4.0, decode_s=2.0, upload_s=20.0)
    assert choose_profile(slow, quick).profile is Profile.SMALL
    assert choose_profile(as_if(slow, Profile.FAST), quick) == choose_profile(slow, quick)


def test_what_was_measured_in_one_profile_says_the_same_as_in_the_other():
    fast = as_if(SHIPPED, Profile.FAST)
    assert as_if(fast, Profile.SMALL).bytes == pytest.approx(SHIPPED.bytes)
    for rate in (1e7, 6e7, 8e7, 1e9):
        link = Link(cluster="east", bytes_per_s=rate)
        assert choose_profile(fast, link).profile is choose_profile(SHIPPED, link).profile


def test_the_ratios_are_those_that_were_measured():
    figures = json.loads(Path("benchmarks/data/codec.json").read_text())
    assert figures["small_ratio_3e6"] / figures["fast_ratio_3e6"] == pytest.approx(FAST_BYTES, rel=0.15)
    for name, ours in (("encode", FAST_ENCODE), ("decode", FAST_DECODE)):
        sparse, dense = (
            figures[f"small_{name}_vs_memcpy{at}"] / figures[f"fast_{name}_vs_memcpy{at}"] for at in ("", "_dense")
        )
        assert min(sparse, dense) < ours < max(sparse, dense)
