"""One lease-bounded slice of rollouts: a loop that drives many sessions of many groups at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from django.conf import settings
from django.db import DatabaseError, connection

from controlplane.errors import StaleFence
from controlplane.selectors.rollout_plans import (
    Need,
    RolloutPlan,
    RolloutStart,
    oldest_allowed,
    places,
    rollout_plan,
)
from controlplane.services.rollouts import group_begin, group_finish
from controlplane.services.work import Claim, work_claim_more, work_yield
from controlplane.states import WorkKind
from rl_core.errors import EnvironmentFault
from rl_core.types import VersionRef
from workers.base import bound, fail, worker_name
from workers.leases import LeaseKeeper
from workers.progress import Outcome, SliceClock
from workers.replicas import ReplicaPool
from workers.sessions import Player

log = structlog.get_logger(__name__)

SESSIONS = 32
_REFRESH_S = 1.0
_LOOK_AGAIN_S = 0.5
_T = TypeVar("_T")


@dataclass(slots=True)
class _Group:
    """A group that this slice has claimed. `open_sessions` is a guess until its plan is read."""

    claim: Claim
    open_sessions: int
    task: asyncio.Task[None] | None = None
    plan: RolloutPlan | None = None


class RolloutSlice:
    """Drives a first group and whatever else is queued, up to `sessions` sessions, until the slice is over.

    All database work is done by one thread of its own, so that the loop never waits for a row.
    """

    def __init__(
        self,
        keeper: LeaseKeeper,
        *,
        pool: ReplicaPool | None = None,
        slice_s: float | None = None,
        sessions: int = SESSIONS,
    ) -> None:
        self._keeper = keeper
        self._pool = pool or ReplicaPool()
        self._clock = SliceClock(time.monotonic() + (settings.ROLLOUT_SLICE_S if slice_s is None else slice_s))
        self._sessions = sessions
        self._groups: dict[uuid.UUID, _Group] = {}
        self._oldest: dict[tuple[uuid.UUID, int], VersionRef | None] = {}
        self._usual_size = 1
        self._look_at = 0.0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollout-database")

    async def run(self, first: Claim) -> None:
        """Until the slice is over or nothing is left to do. Each unit is ended in it, one way or another."""
        self._take(first)
        refresher = asyncio.create_task(self._refresh_forever())
        try:
            while self._groups:
                await self._refill()
                tasks = [group.task for group in self._groups.values() if group.task is not None]
                await asyncio.wait(tasks, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                self._groups = {key: group for key, group in self._groups.items() if not _done(group)}
        finally:
            refresher.cancel()
            await asyncio.gather(refresher, return_exceptions=True)
            await self._hand_back()
            await self._pool.aclose()
            await self._in_database(lambda: connection.close())  # the database thread's own, not this one's
            self._executor.shutdown()

    async def _in_database(self, action: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, action)

    def _take(self, claim: Claim) -> None:
        group = _Group(claim, self._usual_size)
        task = asyncio.create_task(self._roll(group))
        group.task = task
        self._groups[claim.unit_id] = group
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop has ended, and the task with it
                loop.call_soon_threadsafe(task.cancel)

        self._keeper.hold(claim, on_loss=cancel)

    async def _refill(self) -> None:
        """Claim more while there is room and time."""
        room = self._sessions - sum(group.open_sessions for group in self._groups.values())
        if self._clock.over or room < self._usual_size or time.monotonic() < self._look_at:
            return
        limit = max(1, room // self._usual_size)
        more = partial(work_claim_more, kind=WorkKind.ROLLOUT, worker=worker_name(), limit=limit)
        claims = await self._in_database(more)
        for claim in claims:
            self._take(claim)
        if len(claims) < limit:
            self._look_at = time.monotonic() + _LOOK_AGAIN_S

    async def _roll(self, group: _Group) -> None:
        """One group, from its claim to the end of its attempt."""
        claim = group.claim
        with bound(claim):
            try:
                group.plan = await self._in_database(partial(self._begin, claim))
                if group.plan is not None:
                    await self._play(group, group.plan)
            except StaleFence as error:
                log.warning("attempt_superseded", error=str(error))
            except asyncio.CancelledError:
                log.warning("attempt_cancelled")
            except Exception as error:  # noqa: BLE001  # the attempt keeps what happened
                await self._in_database(partial(fail, claim, error))
            finally:
                self._keeper.release(claim)

    def _begin(self, claim: Claim) -> RolloutPlan | None:
        group = group_begin(claim)
        if group is None:
            return None
        plan = rollout_plan(group)
        if plan.exact_version is None:
            self._oldest[plan.lineage_id, plan.max_staleness] = oldest_allowed(plan.lineage_id, plan.max_staleness)
        self._pool.update(places({plan.project_id, *self._projects()}))
        return plan

    async def _play(self, group: _Group, plan: RolloutPlan) -> None:
        claim = group.claim
        key = (plan.lineage_id, plan.max_staleness)
        player = Player(
            claim=claim,
            plan=plan,
            pool=self._pool,
            clock=self._clock,
            in_database=self._in_database,
            oldest=lambda: None if plan.exact_version else self._oldest.get(key),
        )
        still_open = [start for start in plan.rollouts if not start.ended]
        home = self._pool.settle(Need(plan, player.oldest()), len(still_open))
        player.home = home.replica_id
        group.open_sessions = len(still_open)
        self._usual_size = len(plan.rollouts)

        async def play(start: RolloutStart) -> Outcome:
            try:
                return await player.play(start)
            finally:
                group.open_sessions -= 1

        try:
            results = await asyncio.gather(*(play(start) for start in still_open), return_exceptions=True)
        finally:
            home.leave()
        await self._conclude(claim, results, player)

    async def _conclude(self, claim: Claim, results: Sequence[Outcome | BaseException], player: Player) -> None:
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, StaleFence)), errors[0])
        if Outcome.BROKEN in results:
            await self._in_database(partial(fail, claim, player.error or EnvironmentFault("a session broke")))
        elif Outcome.PAUSED in results:
            await self._in_database(partial(work_yield, claim))
        else:
            await self._in_database(partial(group_finish, claim))

    async def _refresh_forever(self) -> None:
        """Keep what is known of replicas and heads at most a second old."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            with suppress(DatabaseError):  # what is known stays, and is looked up again in a second
                await self._in_database(self._refresh)

    def _refresh(self) -> None:
        for lineage_id, max_staleness in list(self._oldest):
            self._oldest[lineage_id, max_staleness] = oldest_allowed(lineage_id, max_staleness)
        self._pool.update(places(self._projects()))

    def _projects(self) -> set[uuid.UUID]:
        return {group.claim.project_id for group in self._groups.values()}

    async def _hand_back(self) -> None:
        """The process is told to end in the middle: stop, and let somebody else have what is left at once."""
        left = [group for group in self._groups.values() if not _done(group)]
        for group in left:
            if group.task is not None:
                group.task.cancel()
                await asyncio.gather(group.task, return_exceptions=True)
            with suppress(StaleFence, DatabaseError):
                await self._in_database(partial(work_yield, group.claim))


def _done(group: _Group) -> bool:
    return group.task is not None and group.task.done()
