"""Frame codecs behind one interface: of several modes, each frame takes the smallest that its profile allows.

| mode | says | applies backwards |
|---|---|---|
| `raw`, `planes` | the new words, whole or in byte planes | no |
| `rice_ulp` | where words changed, and by how much; of the smallest words, whether | yes |
| `hazard` | the same, with the old words' magnitude as the context of all of it | yes |
| `gap_ulp`, `class_gap_ulp`, `tiny_gap_ulp` | what `frames/1`, `/2` and `/3` wrote, read for ever | yes |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rl_core.delta.classes import decode_class_gap_ulp
from rl_core.delta.contexts import decode_hazard, encode_hazard
from rl_core.delta.gaps import (
    Extracted,
    choose_threshold,
    decode_rice_ulp,
    decode_tiny_gap_ulp,
    extract,
    pack_extracted,
)
from rl_core.delta.patches import Patch, Pieces
from rl_core.delta.sparse import decode_gap_ulp
from rl_core.delta.streams import FixedStreamReader, StreamReader
from rl_core.delta.whole import decode_planes, decode_raw, encode_planes, encode_raw
from rl_core.types import Profile as Profile

CODEC_VERSION: Final = "frames/4"
KNOWN_CODECS: Final = frozenset({"frames/1", "frames/2", "frames/3", CODEC_VERSION})

_TRY_PLAIN: Final = 4096  # with more changes than this, contexts are worth what their tables cost
_TRY_WHOLE: Final = 8  # a patch smaller than an eighth of its words is never beaten by whole words in practice


class FrameMode(StrEnum):
    """How a frame's payload is written."""

    RAW = "raw"
    PLANES = "planes"
    GAP_ULP = "gap_ulp"  # of frames/1 and frames/2
    CLASS_GAP_ULP = "class_gap_ulp"  # of frames/2
    TINY_GAP_ULP = "tiny_gap_ulp"  # of frames/3
    RICE_ULP = "rice_ulp"
    HAZARD = "hazard"

    @property
    def sparse(self) -> bool:
        """Whether it is a patch of old words, which applies backwards too."""
        return self not in (FrameMode.RAW, FrameMode.PLANES)


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame's payload with its mode, and how many words it changes (all, for a whole frame without a base)."""

    mode: FrameMode
    payload: bytes | memoryview
    changes: int


def encode_frame(*, old: Pieces | None, new: Pieces, profile: Profile = Profile.SMALL) -> EncodedFrame:
    """Encode one frame, pieces laid end to end. `old` None means that the receiver has nothing to patch."""
    if old is None or [(a.size, a.dtype) for a in old] != [(a.size, a.dtype) for a in new]:
        return _whole(new, changes=sum(piece.size for piece in new))
    found = extract(old, new, threshold=choose_threshold(old, new) if profile is Profile.FAST else 0)
    return encode_found(found, profile, words=sum(piece.size for piece in new), old=lambda: old, new=lambda: new)


def encode_found(
    found: Extracted, profile: Profile, *, words: int, old: Callable[[], Pieces], new: Callable[[], Pieces]
) -> EncodedFrame:
    """Encode a frame of so many words from what detection found. `old` and `new` are asked for only where needed."""
    payloads: dict[FrameMode, bytes] = {}
    if profile is Profile.SMALL and found.count:
        payloads[FrameMode.HAZARD] = encode_hazard(found.changes, old())
    if profile is Profile.FAST or found.count < _TRY_PLAIN:
        payloads[FrameMode.RICE_ULP] = pack_extracted(found, words)
    mode = min(payloads, key=lambda mode: len(payloads[mode]))
    patch = EncodedFrame(mode, payloads[mode], found.count)
    if len(patch.payload) * _TRY_WHOLE > words * found.small.itemsize:
        whole = _whole(new(), changes=found.count)
        if len(whole.payload) < len(patch.payload):
            return whole
    return patch


def _whole(new: Pieces, *, changes: int) -> EncodedFrame:
    if new[0].itemsize == 1:
        return EncodedFrame(FrameMode.RAW, encode_raw(new), changes)
    return EncodedFrame(FrameMode.PLANES, encode_planes(new), changes)


def decode_frame(
    mode: FrameMode,
    payload: bytes | memoryview,
    *,
    pieces: Pieces,
    backward: bool = False,
    codec: str = CODEC_VERSION,
) -> list[Patch]:
    """The patch of each piece. `pieces` are the words to patch: the old ones, or with `backward` the new ones.

    They are as before when this returns. Raises: DigestMismatch for bytes that this mode never writes.
    """
    match mode:
        case FrameMode.RAW:
            return decode_raw(payload, pieces)
        case FrameMode.PLANES:
            return decode_planes(payload, pieces)
        case FrameMode.GAP_ULP:
            return decode_gap_ulp(payload, pieces, FixedStreamReader if codec == "frames/1" else StreamReader)
        case FrameMode.RICE_ULP:
            return decode_rice_ulp(payload, pieces, backward=backward)
        case FrameMode.TINY_GAP_ULP:
            return decode_tiny_gap_ulp(payload, pieces, backward=backward)
        case FrameMode.HAZARD:
            return decode_hazard(payload, pieces, backward=backward)
        case FrameMode.CLASS_GAP_ULP:
            return decode_class_gap_ulp(payload, pieces, backward=backward)
