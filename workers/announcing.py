"""Replicas are told of a version's segments while it is published, so that they have decoded them when it is committed.

Hints alone: nothing waits for them, what cannot be told is left out, and losing all of them costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import structlog
from django.db import DatabaseError, InterfaceError

from controlplane.conductor.fleet import control_client
from controlplane.models import Run
from controlplane.selectors.followers import Follower, followers
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import AnnounceBody, StandingRef
from rl_core.errors import EngineError
from rl_core.types import VersionRef

_MOST_BYTES: Final = 4 << 20  # of what is said of a segment: engines take 8 MiB; beyond it is only fetched ahead

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Told:
    """A follower as long as it takes announcements, one after another: its client is for one thread."""

    follower: Follower
    client: ControlClient
    queue: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="announce"))
    listens: bool = True


class Announcer:
    """Announces what one step publishes. `begins` says of what; a later one replaces it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._version: VersionRef | None = None
        self._fence = 0
        self._told: list[_Told] | None = None

    def begins(self, version: VersionRef, *, fence: int) -> None:
        """The attempt with this fence is about to publish the version."""
        self._version, self._fence = version, fence

    def progress(self, told: dict[str, Any]) -> None:
        """Take what the trainer process tells of its progress. Raises nothing: the step goes on without hints."""
        if "stands" not in told:
            return
        try:
            stands = msgspec.convert(told["stands"], type=StandingRef)
            if len(msgspec.json.encode(stands)) > _MOST_BYTES:
                stands = StandingRef(stands.segment)
            body = self._body(segments=[stands])
            for one in self._listeners():
                one.queue.submit(_tell, one, body)
        except Exception:
            log.exception("not_announced")

    def withdraw(self) -> None:
        """What was announced will not be committed. Said last: an announcement that came after it would stay."""
        for one in self._told or ():
            one.queue.shutdown(cancel_futures=True)
            one.listens = True  # what it answered too late it may have taken
            _tell(one, self._body(withdrawn=True))

    def close(self) -> None:
        """Wait until everything is told, or nobody listens any more."""
        for one in self._told or ():
            one.queue.shutdown()
            one.client.close()

    def _listeners(self) -> list[_Told]:
        """Asked for once, when the first segment stands: the training before it took its time."""
        if self._told is None:
            self._told = []
            try:
                found = followers(self._run)
            except (DatabaseError, InterfaceError) as error:
                log.warning("not_announced", error=str(error)[:200])
                return self._told
            for follower in found:
                try:
                    self._told.append(_Told(follower, control_client(follower.replica)))
                except (EngineError, OSError) as error:  # its token is on another machine
                    log.info("not_announced", replica=follower.replica.name, error=str(error))
        return self._told

    def _body(self, *, segments: list[StandingRef] | None = None, withdrawn: bool = False) -> AnnounceBody:
        return AnnounceBody(version=str(self._version), fence=self._fence, segments=segments or [], withdrawn=withdrawn)


def _tell(one: _Told, body: AnnounceBody) -> None:
    if not one.listens:
        return
    follower = one.follower
    own = msgspec.structs.replace(
        body, slots=follower.slots, peers=follower.peers, limit_bytes_s=follower.limit_bytes_s
    )
    try:
        one.client.announce(own)
    except EngineError as error:
        one.listens = False
        log.info("not_announced", replica=follower.replica.name, error=str(error)[:200])


@contextmanager
def announcing(run: Run) -> Iterator[Announcer]:
    """An announcer for one step; what it announced is withdrawn when the step comes to nothing."""
    announcer = Announcer(run)
    try:
        yield announcer
    except BaseException:
        announcer.withdraw()
        raise
    finally:
        announcer.close()
