"""Versions decoded while they are still being published: into the shadow, beside what serves, segment by segment.

What the publisher tells of a segment's frames is held to what a manifest is held to, and in the end the manifest itself
must begin with exactly what was decoded: then an update goes on from there. Anything else takes it back first: another
target, a withdrawal, another attempt, a frame that does not read. What could not be taken back is not decoded ahead.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from rl_core.delta.ahead import FetchAhead, Publication
from rl_core.delta.apply import HopApplication, payloads_of
from rl_core.delta.codec import KNOWN_CODECS
from rl_core.delta.manifest import (
    Base,
    Draft,
    Manifest,
    ManifestKind,
    Segment,
    StandingSegment,
    TensorEntry,
    check_frame,
    check_segment,
    forms_digest,
)
from rl_core.delta.path import Hop, HopKind, StandsAt
from rl_core.delta.priority import give_way
from rl_core.delta.shadow import ShadowWeights
from rl_core.delta.spool import Spool
from rl_core.delta.words import dtype_tag, total_bytes
from rl_core.errors import ManifestError, RlCoreError

log = logging.getLogger(__name__)

_NOWHERE: Final = (-1, 0)


class EarlyHop:
    """A hop whose manifest is not there yet. For one thread; `close` it, or hand it to an update.

    The shadow counts as poisoned until then.
    """

    def __init__(
        self, publication: Publication, draft: Draft, shadow: ShadowWeights, *, spool: Spool, threads: int = 1
    ) -> None:
        """Raises: ManifestError where this build or these weights are not what the draft is for; BaseMismatch."""
        if draft.codec not in KNOWN_CODECS or draft.forms != forms_digest(shadow.tensors):
            raise ManifestError(f"{publication.version} has another codec or other tensors; wait for its manifest")
        self.publication = publication
        self.stands_at = StandsAt(root=shadow.root, version=shadow.version, manifest_key=shadow.manifest_key)
        self.decode_s = 0.0
        base = Base(shadow.version, draft.base_root, shadow.manifest_key)
        self._spool = spool
        self._known = Manifest(
            codec=draft.codec,
            version=str(publication.version),
            fence=publication.fence,
            kind=ManifestKind.DELTA,
            base=base,
            root=shadow.root,
            reversible=False,
            full_bytes=total_bytes(shadow.tensors),
            changed_elements=0,
            elements=0,
            tensors=[
                TensorEntry(name, dtype_tag(tensor), list(tensor.shape), shadow.leaves[name])
                for name, tensor in sorted(shadow.tensors.items())
            ],
            frames=[],
            segments=[],
        )
        # Frames come in order, of each dtype for itself: what lies behind the last one's end is final.
        self._reached: defaultdict[str, tuple[int, int]] = defaultdict(lambda: _NOWHERE)
        self._behind: dict[str, list[int]] = defaultdict(list)
        for index in reversed(range(len(self._known.tensors))):
            self._behind[self._known.tensors[index].dtype].append(index)
        self._ends = False
        hop = Hop(kind=HopKind.FORWARD, manifest_key="", manifest=self._known, leads_to=base)
        self.application = HopApplication(shadow, hop, threads=threads)
        self.application.begin()

    @property
    def segments(self) -> list[Segment]:
        """Those that are decoded."""
        return self._known.segments

    @property
    def due(self) -> bool:
        """Whether the next segment is here and may be decoded."""
        told, number = self.publication.told, len(self.segments)
        return not self._ends and number < len(told) and self._spool.path(told[number].segment.blake3) is not None

    def advance(self) -> None:
        """Decode the next segment. Raises: ManifestError, SpecError, DigestMismatch: `close` it then."""
        number, known = len(self.segments), self._known
        one = self.publication.told[number]
        data, first = self._spool.get(one.segment), len(known.frames)
        started = time.perf_counter()
        self._check(one, number)
        self._ends = data is None or not self.application.stays_reversible(one.frames)
        if data is None or self._ends:
            return
        known.frames.extend(one.frames)
        self.application.expect()
        payloads = payloads_of(known, range(first, len(known.frames)), data)
        self.application.apply(payloads, resident=False)
        known.segments.append(one.segment)
        for dtype, (tensor, _) in self._reached.items():
            behind = self._behind[dtype]
            while behind and behind[-1] < tensor:
                self.application.settle([behind.pop()])
        self.decode_s += time.perf_counter() - started

    def _check(self, one: StandingSegment, number: int) -> None:
        known = self._known
        check_segment(one.segment)
        segments = [*known.segments, one.segment]
        for frame in one.frames:
            check_frame(frame, known, segments=segments)
            if frame.segment != number:
                raise ManifestError(f"{known.version}: a frame is told of with a segment that it does not lie in")
            dtype = known.tensors[frame.ranges[0].tensor].dtype
            for piece in frame.ranges:
                if (piece.tensor, piece.start) < self._reached[dtype]:
                    raise ManifestError(f"{known.version}: frames are not in order, or hold the same elements")
                self._reached[dtype] = (piece.tensor, piece.start + piece.count)

    def leads_into(self, hop: Hop) -> bool:
        """Whether a hop begins with exactly what was decoded, on these weights."""
        whole, known = hop.manifest, self._known
        frames, segments = len(known.frames), len(known.segments)
        return (
            hop.kind is HopKind.FORWARD
            and whole.base is not None
            and (whole.base.root, whole.version, whole.fence, whole.codec)
            == (self.stands_at.root, known.version, known.fence, known.codec)
            and [_form(entry) for entry in whole.tensors] == [_form(entry) for entry in known.tensors]
            and whole.segments[:segments] == known.segments
            and whole.frames[:frames] == known.frames
            and all(frame.segment >= segments for frame in whole.frames[frames:])
        )

    def close(self) -> None:
        """Take it back. The shadow is what it was, or poisoned."""
        self.application.__exit__(None, None, None)


def _form(entry: TensorEntry) -> tuple[str, str, list[int]]:
    return entry.name, entry.dtype, entry.shape


class DecodeAhead:
    """What a slot decodes while it has no target, a segment at a time. For the thread that owns the slot's shadow."""

    def __init__(self, ahead: FetchAhead, spool: Spool, slot: str, *, threads: int = 1) -> None:
        self._ahead = ahead
        self._spool = spool
        self._slot = slot
        self._threads = threads
        self._hop: EarlyHop | None = None

    def due(self, root: str) -> bool:
        """Whether there is something to decode, or to take back. `root` is the shadow's, empty while it has none."""
        if self._hop is not None:
            return self._hop.publication.over or self._hop.due
        return self._offered(root) is not None

    def work(self, root: str, take_shadow: Callable[[], ShadowWeights]) -> None:
        """Do the next piece of it. Raises nothing: what fails is given up, and left to the update."""
        give_way()
        try:
            if self._hop is None:
                self._begin(root, take_shadow)
            elif self._hop.publication.over:
                self._give_up()
            else:
                self._hop.advance()
        except RlCoreError as error:
            log.warning("not_decoded_ahead slot=%s error=%s", self._slot, error)
            self._give_up()
        except Exception:
            log.exception("decode_ahead_fault slot=%s", self._slot)
            self._give_up()

    def hand_over(self) -> EarlyHop | None:
        """What was decoded, for an update, which ends it."""
        hop, self._hop = self._hop, None
        return hop

    def abandon(self) -> None:
        """The process ends."""
        if self._hop is not None:
            self._hop.application.abandon()

    def _offered(self, root: str) -> Publication | None:
        found = self._ahead.drafted(self._slot, root)
        if found is None or self._spool.path(found.told[0].segment.blake3) is None:
            return None
        return found

    def _begin(self, root: str, take_shadow: Callable[[], ShadowWeights]) -> None:
        found = self._offered(root)
        draft = found.told[0].draft if found is not None else None
        if found is None or draft is None:
            return
        found.begun_by.add(self._slot)  # once, whatever becomes of it
        if draft.codec in KNOWN_CODECS:
            self._hop = EarlyHop(found, draft, take_shadow(), spool=self._spool, threads=self._threads)

    def _give_up(self) -> None:
        if (hop := self.hand_over()) is None:
            return
        try:
            hop.close()
        except Exception:  # the shadow stays poisoned, and the next update begins from a snapshot
            log.exception("take_back_fault slot=%s", self._slot)
