"""Worlds started ahead. Each waits for one job, runs it and is gone; the pool is refilled when nobody asks.

Limits that are fixed when a world starts make its class. The pool holds worlds of the few classes asked for last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

import structlog

from rl_core.errors import WorldError
from rl_core.sandbox.launch import Launcher
from rl_core.sandbox.protocol import RunLimits
from rl_core.sandbox.world import World

log = structlog.get_logger(__name__)

_CLASSES = 2
_QUIET_S = 0.05  # nobody has asked for so long: starting a world then takes the processor from nobody
_AFTER_FAILURE_S = 5.0

Class = tuple[int, ...]


def class_of(limits: RunLimits) -> Class:
    """What of a run's limits is fixed when its world starts."""
    return (limits.cpu_s, limits.memory_bytes, limits.pids, limits.disk_bytes)


class Pool:
    """Gives out worlds: one that waits, where there is one of the class, else a new one."""

    def __init__(self, launcher: Launcher, *, ahead: int, idle: Callable[[], bool]) -> None:
        """At most `ahead` worlds wait. They are started while `idle()`."""
        self._launcher, self._ahead, self._idle = launcher, ahead, idle
        self._waiting: OrderedDict[Class, tuple[RunLimits, deque[World]]] = OrderedDict()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closing: set[asyncio.Task[None]] = set()
        self._want(RunLimits())

    @property
    def waiting(self) -> int:
        """How many worlds wait for a job."""
        return sum(world.alive for _, worlds in self._waiting.values() for world in worlds)

    @contextlib.asynccontextmanager
    async def one(self, limits: RunLimits) -> AsyncIterator[World]:
        """A world for one job; it is taken down afterwards, beside whatever comes next. Raises: WorldError."""
        world = self._take(limits) or self._launcher.start(limits)
        try:
            yield world
        finally:
            self._close(world)
            self._changed.set()

    async def keep_filled(self) -> None:
        """Start worlds ahead for ever. Cancel it to take down those that wait."""
        try:
            while True:
                quiet_s = self._loop.time() - self._asked_at
                if not (self._ahead and self._idle() and (limits := self._missing())):
                    self._changed.clear()
                    await self._changed.wait()
                elif quiet_s < _QUIET_S:
                    await asyncio.sleep(_QUIET_S - quiet_s)
                else:
                    await self._start_one(limits)
        finally:
            for _, worlds in self._waiting.values():
                for world in worlds:
                    self._close(world)
            await asyncio.gather(*self._closing)

    def _want(self, limits: RunLimits) -> None:
        """Its class is the one asked for last. Worlds of the class that nobody asked for longest are taken down."""
        self._asked_at = self._loop.time()
        key = class_of(limits)
        self._waiting.setdefault(key, (limits, deque()))
        self._waiting.move_to_end(key)
        while len(self._waiting) > _CLASSES:
            for world in self._waiting.popitem(last=False)[1][1]:
                self._close(world)

    def _take(self, limits: RunLimits) -> World | None:
        self._want(limits)
        worlds = self._waiting[class_of(limits)][1]
        while worlds:
            world = worlds.popleft()
            if world.alive:
                return world
            self._close(world)
        return None

    def _missing(self) -> RunLimits | None:
        """Of which limits a world is to be started; each class has an even share."""
        share = max(1, self._ahead // len(self._waiting))
        for limits, worlds in reversed(self._waiting.values()):
            for dead in [world for world in worlds if not world.alive]:
                worlds.remove(dead)
                self._close(dead)
            if len(worlds) < share and self.waiting < self._ahead:
                return limits
        return None

    async def _start_one(self, limits: RunLimits) -> None:
        try:
            world = self._launcher.start(limits)
            try:
                await asyncio.wait_for(world.ready(), limits.wall_s + _AFTER_FAILURE_S)
            except BaseException:
                self._close(world)
                raise
        except (WorldError, OSError, TimeoutError) as error:
            log.warning("sandbox_pool_start_failed", error=str(error))
            await asyncio.sleep(_AFTER_FAILURE_S)
            return
        if class_of(limits) in self._waiting:
            self._waiting[class_of(limits)][1].append(world)
        else:
            self._close(world)

    def _close(self, world: World) -> None:
        task = asyncio.create_task(self._closed(world))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, world: World) -> None:
        try:
            await world.close()
        except (WorldError, OSError):
            log.exception("sandbox_user_lost")
