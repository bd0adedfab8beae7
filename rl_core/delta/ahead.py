"""Segments of versions that are still being published, brought into the spool as they come to stand.

A hint, never a promise: what was not brought an update fetches itself; what was, `early` decodes. One segment is under
way at a time, and none while an update reads: a kill costs one at most, and the link carries no more than it may. What
was brought for a version that comes to nothing goes again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from rl_core.delta.fetch import CONNECTIONS, Origin, SegmentSource
from rl_core.delta.manifest import Segment, StandingSegment
from rl_core.delta.priority import give_way
from rl_core.delta.spool import Spool
from rl_core.errors import RlCoreError
from rl_core.types import VersionRef

log = logging.getLogger(__name__)

_MOST: Final = 8  # publications known at once

OpenSource = Callable[[], AbstractContextManager[SegmentSource]]


@dataclass(slots=True, eq=False)
class Publication:
    """A version on its way into the store: segments that wait, and those brought that no update has taken, by digest.

    `source` stays open until the publication is forgotten. `told` are those that `slots` may decode: from the first on,
    without a gap; `begun_by` those that began to. `over`: nothing of it is to be decoded ahead, and what was is to be
    taken back.
    """

    version: VersionRef
    fence: int
    source: SegmentSource
    resources: ExitStack
    waiting: dict[str, Segment] = field(default_factory=dict)
    brought: dict[str, tuple[Origin, float]] = field(default_factory=dict)
    bytes: int = 0
    slots: frozenset[str] = frozenset()
    told: list[StandingSegment] = field(default_factory=list)
    begun_by: set[str] = field(default_factory=set)
    over: bool = False

    def hear(self, one: StandingSegment) -> None:
        """Note what may be decoded. Another content under a number that was told already ends that."""
        number = one.frames[0].segment if one.frames else -1
        if one.draft is None or not 0 <= number <= len(self.told):
            return
        if number < len(self.told):
            self.over |= self.told[number] != one
        else:
            self.over |= number > 0 and self.told[0].draft != one.draft
            self.told.append(one)


class FetchAhead:
    """One replica's fetching ahead into its spool. Safe to share between threads."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._changed = threading.Condition()
        self._publications: dict[VersionRef, Publication] = {}
        self._listeners: list[Callable[[], None]] = []
        self._updates = 0
        self._fetching = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="fetch-ahead", daemon=True)

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on any thread, when there may be something to decode or to take back."""
        self._listeners.append(changed)

    def drafted(self, slot: str, root: str) -> Publication | None:
        """What a slot whose weights have this root may begin to decode ahead."""
        with self._changed:
            for known in self._publications.values():
                draft = known.told[0].draft if known.told else None
                may = not known.over and slot in known.slots and slot not in known.begun_by
                if may and draft is not None and draft.base_root == root:
                    return known
        return None

    def announce(
        self,
        version: VersionRef,
        fence: int,
        standing: Sequence[StandingSegment],
        *,
        source: OpenSource,
        slots: Collection[str] = (),
    ) -> None:
        """Segments that stand. `source` is where a new attempt's come from; an older attempt's are not heeded."""
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            for other in [other for other in self._publications if _is_over(other, version)]:
                self._forget(other)
            while len(self._publications) >= _MOST and version not in self._publications:
                self._forget(next(iter(self._publications)))
            known = self._publications.get(version)
            if known is not None and known.fence > fence:
                return
            if known is None or known.fence < fence:
                known = self._begin(version, fence, source, before=known)
            known.slots = frozenset(slots)
            for one in standing:
                known.hear(one)
                if one.segment.blake3 not in known.brought:
                    known.waiting[one.segment.blake3] = one.segment
            self._changed.notify_all()
        self._tell()

    def withdraw(self, version: VersionRef, fence: int) -> None:
        """The attempt will not commit the version."""
        with self._changed:
            known = self._publications.get(version)
            if known is not None and known.fence == fence:
                self._forget(version)
        self._tell()

    def take(self, digest: str) -> tuple[Origin, float] | None:
        """An update wants the segment: whence it was brought and how long that took; None when it was not brought."""
        with self._changed:
            found = None
            for known in self._publications.values():
                known.waiting.pop(digest, None)
                found = known.brought.pop(digest, None) or found
            return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Bring nothing while an update reads. Waits for the segment that is under way."""
        with self._changed:
            self._updates += 1
            self._changed.wait_for(lambda: not self._fetching)
        try:
            yield
        finally:
            with self._changed:
                self._updates -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End, after the segment that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        for known in self._publications.values():
            known.resources.close()

    def _tell(self) -> None:
        for changed in self._listeners:
            changed()

    def _begin(self, version: VersionRef, fence: int, source: OpenSource, *, before: Publication | None) -> Publication:
        """Another attempt tends to make the same segments: what an older one left brought stays for it."""
        resources = ExitStack()
        made = Publication(version, fence, resources.enter_context(source()), resources)
        if before is not None:
            made.brought, made.bytes = before.brought, before.bytes
            before.over = True
            before.waiting.clear()
            before.resources.close()
        self._publications[version] = made
        return made

    def _forget(self, version: VersionRef) -> None:
        gone = self._publications.pop(version)
        gone.over = True
        gone.waiting.clear()
        # An update that reads may be on its way through this version: then the spool's room is what bounds them.
        for digest in gone.brought if not self._updates else ():
            self._spool.discard(digest)
        gone.resources.close()

    def _next(self) -> tuple[Publication, Segment] | None:
        if self._updates:
            return None
        for known in self._publications.values():
            for segment in known.waiting.values():
                return known, segment
        return None

    def _loop(self) -> None:
        give_way()
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="part") as parts:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._next() is not None)
                    found = self._next()
                    if self._closing or found is None:
                        return
                    self._fetching = True
                self._bring(*found, parts=parts)
                with self._changed:
                    self._fetching = False
                    self._changed.notify_all()
                self._tell()

    def _bring(self, publication: Publication, segment: Segment, *, parts: ThreadPoolExecutor) -> None:
        """Fetch one. Where that fails, or the spool has no room for it, the rest is left to the update."""
        brought: tuple[Origin, float] | None = None
        fits = publication.bytes + segment.size <= self._spool.max_bytes
        try:
            if fits and self._spool.path(segment.blake3) is None:
                got = publication.source.fetch(0, segment, on_bytes=lambda count: None, parts=parts)
                brought, fits = (got.origin, got.seconds), not got.resident
        except RlCoreError as error:
            log.warning("not_fetched_ahead version=%s segment=%s error=%s", publication.version, segment.key, error)
            fits = False
        except Exception:
            log.exception("fetch_ahead_fault version=%s segment=%s", publication.version, segment.key)
            fits = False
        with self._changed:
            publication.waiting.pop(segment.blake3, None)
            if not fits:
                publication.waiting.clear()
                return
            publication.bytes += segment.size
            if brought is None:
                return
            if publication.version in self._publications:
                self._publications[publication.version].brought[segment.blake3] = brought
            else:
                self._spool.discard(segment.blake3)


def _is_over(other: VersionRef, version: VersionRef) -> bool:
    """Whether nothing brought for `other` is waited for any more once `version` is being published.

    The version before was committed, and replicas may be on their way to it.
    """
    if other.lineage != version.lineage or other == version:
        return False
    return other.epoch != version.epoch or other.number != version.number - 1
