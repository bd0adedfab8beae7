"""Which profile a delta is encoded in: the one with which the slowest link's replicas serve it first.

A version is encoded, carried and decoded segment by segment, all at once: whichever of these takes longest tells when
it is there. What each took is measured with the version before; what the other profile would have taken follows from
how `python -m benchmarks delta` found the two beside each other.
Units: bytes and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rl_core.types import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A delta as it went: encoding alone, its way to the store, and decoding alone at its slowest replica.

    `upload_s` of 0: not known.
    """

    profile: Profile
    bytes: float
    encode_s: float
    decode_s: float
    upload_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a cluster's link from the store gave when it was measured, or the trainer's to it."""

    cluster: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A profile, and why it is taken."""

    profile: Profile
    reason: str


# `fast` ÷ `small` at about 1 % of the weights changed; benchmarks/data/codec.json has the figures at three densities.
FAST_BYTES: Final = 1.3
FAST_ENCODE: Final = 0.26
FAST_DECODE: Final = 0.2


def as_if(shipped: Shipped, profile: Profile) -> Shipped:
    """What the delta would have been in `profile`."""
    if profile is shipped.profile:
        return shipped
    power = 1 if profile is Profile.FAST else -1
    return Shipped(
        profile=profile,
        bytes=shipped.bytes * FAST_BYTES**power,
        encode_s=shipped.encode_s * FAST_ENCODE**power,
        decode_s=shipped.decode_s * FAST_DECODE**power,
        upload_s=shipped.upload_s * FAST_BYTES**power,
    )


def choose_profile(shipped: Shipped | None, link: Link | None) -> Choice:
    """The profile that ends sooner over the link, or over the trainer's own if that is slower.

    `small` until a version was carried over a link.
    """
    if shipped is None or link is None:
        return Choice(Profile.SMALL, "no link has been measured yet")
    if shipped.bytes < shipped.upload_s * link.bytes_per_s:
        link = Link(cluster="the store", bytes_per_s=shipped.bytes / shipped.upload_s)
    ends_s = {profile: _ends_s(as_if(shipped, profile), link) for profile in Profile}
    sooner, later = sorted(Profile, key=lambda profile: ends_s[profile])
    rate = f"{link.bytes_per_s / 1e6:.3g} MB/s to {link.cluster}"
    return Choice(sooner, f"{ends_s[sooner]:.3g} s at {rate}; {later} takes {ends_s[later]:.3g} s")


def _ends_s(shipped: Shipped, link: Link) -> float:
    return max(shipped.encode_s, shipped.bytes / link.bytes_per_s, shipped.decode_s)
