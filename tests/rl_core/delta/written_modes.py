"""The modes that today's codec writes, each by itself: the encoder takes the smallest."""

from __future__ import annotations

from rl_core.delta.codec import FrameMode
from rl_core.delta.contexts import encode_hazard
from rl_core.delta.gaps import extract, pack_extracted
from rl_core.delta.patches import Pieces
from rl_core.delta.whole import encode_planes, encode_raw

WRITTEN = [FrameMode.RAW, FrameMode.PLANES, FrameMode.RICE_ULP, FrameMode.HAZARD]


def encode_pieces(mode: FrameMode, old: Pieces, new: Pieces, *, threshold: int = 60) -> bytes:
    """A frame's payload in a mode of the caller's choice."""
    match mode:
        case FrameMode.RAW:
            return encode_raw(new)
        case FrameMode.PLANES:
            return bytes(encode_planes(new))
        case FrameMode.RICE_ULP:
            return pack_extracted(extract(old, new, threshold=threshold), sum(piece.size for piece in new))
        case FrameMode.HAZARD:
            return encode_hazard(extract(old, new).changes, old)
    raise ValueError(f"{mode} is written no more")
