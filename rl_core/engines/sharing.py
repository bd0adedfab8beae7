"""What a replica fetches it keeps on disk for a while: to go on after a kill, and for the peers of its cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rl_core.delta.ahead import FetchAhead
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.manifest import StandingSegment
from rl_core.delta.peers import PeerSegments, Wanted
from rl_core.delta.spool import SPOOL_BYTES, Spool
from rl_core.engines.protocol import AnnounceBody, TargetBody
from rl_core.errors import SpecError
from rl_core.store import ObjectStore, check_key
from rl_core.types import VersionRef


class SegmentSharing:
    """One replica's spool, and what its peers may know of it. Several slots share one."""

    def __init__(self, folder: Path, *, max_bytes: int = SPOOL_BYTES, peer_token: str | None = None) -> None:
        """`peer_token` is what the replicas of a cluster ask of each other; without it no peer is asked.

        Raises: StoreUnavailable when the folder cannot be made.
        """
        self.spool = Spool(folder, max_bytes=max_bytes)
        self.ahead = FetchAhead(self.spool)
        self.wanted = Wanted()
        self._peer_token = peer_token

    @contextmanager
    def source(
        self, store: ObjectStore, target: TargetBody, *, interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[SegmentSource]:
        """Where the segments of one update come from. Nothing is fetched ahead while it reads."""
        with self._peers(target.peers, interrupted) as peers:
            yield SegmentSource(
                store, spool=self.spool, peers=peers, ahead=self.ahead, limit_bytes_s=target.limit_bytes_s,
                interrupted=interrupted,
            )  # fmt: skip

    def announce(self, store: ObjectStore, body: AnnounceBody) -> None:
        """Segments of a version that is being published: fetch them ahead, for slots to decode.

        Raises: SpecError for an unsafe key, or frames that are none.
        """
        version = VersionRef.parse(body.version)
        if body.withdrawn:
            self.ahead.withdraw(version, body.fence)
            return
        try:
            standing = msgspec.convert(msgspec.to_builtins(body.segments), type=list[StandingSegment])
        except msgspec.ValidationError as error:
            raise SpecError(f"what is said of a segment is malformed: {error}") from error
        for one in standing:
            check_key(one.segment.key)
        self.ahead.announce(
            version, body.fence, standing, source=lambda: self._ahead_source(store, body), slots=body.slots
        )

    @contextmanager
    def _ahead_source(self, store: ObjectStore, body: AnnounceBody) -> Iterator[SegmentSource]:
        with self._peers(body.peers) as peers:
            yield SegmentSource(store, spool=self.spool, peers=peers, limit_bytes_s=body.limit_bytes_s)

    @contextmanager
    def _peers(
        self, urls: Sequence[str], interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[PeerSegments | None]:
        if self._peer_token is None or not urls:
            yield None
            return
        peers = PeerSegments(urls, token=self._peer_token, wanted=self.wanted, interrupted=interrupted)
        try:
            yield peers
        finally:
            peers.close()
