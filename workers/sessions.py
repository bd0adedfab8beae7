"""Playing one session to its end, turn by turn, every turn written down before the next begins."""

from __future__ import annotations

import asyncio
import functools
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import structlog
from django.conf import settings

from controlplane.selectors.rollout_plans import RolloutPlan, RolloutStart
from controlplane.services.rollouts import (
    RolloutProgress,
    rollout_checkpoint,
    rollout_fail,
    rollout_finish,
    versions_by_text,
)
from controlplane.services.work import Claim
from rl_core.chat import ChatTokenizer
from rl_core.environments.harness import Harness, Session
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.world import World
from rl_core.errors import (
    EngineBusy,
    EngineUnreachable,
    EnvironmentFault,
    RlCoreError,
    TrajectoryError,
    VersionUnavailable,
    WorldError,
)
from rl_core.sandbox.client import SandboxClient
from rl_core.types import Fault, Generated, SamplingParams, VersionRef
from workers.base import store
from workers.replicas import Need, ReplicaPool

log = structlog.get_logger(__name__)

_BACKOFF_S = 0.05
_BACKOFF_CAP_S = 2.0
_WORLD_TRIES = 3

InDatabase = Callable[[Callable[[], object]], Awaitable[object]]


class Outcome(StrEnum):
    """How a session left the slice."""

    ENDED = "ended"
    PAUSED = "paused"  # the slice's time is over; it goes on from its last turn
    BROKEN = "broken"  # not the policy's fault; the group's next attempt starts it again


@dataclass(slots=True)
class SliceClock:
    """When the slice ends: no turn begins after it."""

    ends_at: float

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return time.monotonic() >= self.ends_at


@dataclass(slots=True)
class Player:
    """Plays the sessions of one group. `oldest` gives the oldest version that may be used now."""

    claim: Claim
    plan: RolloutPlan
    pool: ReplicaPool
    clock: SliceClock
    in_database: InDatabase
    oldest: Callable[[], VersionRef | None]
    home: uuid.UUID | None = None
    error: RlCoreError | None = None

    async def play(self, start: RolloutStart) -> Outcome:
        """One session, until it ends, breaks, or the slice is over. Raises: StaleFence, and what is a bug."""
        if start.ended:
            return Outcome.ENDED
        harness = harness_of(self.plan.environment, self.plan.model_folder)
        try:
            session = await self._open(harness, start)
            return await self._turns(harness, session, start)
        except (EnvironmentFault, TrajectoryError) as error:
            return await self._broken(start, Fault.ENVIRONMENT, error)
        except RlCoreError as error:
            return await self._broken(start, Fault.INFRASTRUCTURE, error)

    async def _open(self, harness: Harness, start: RolloutStart) -> Session:
        if start.session_key:
            return Session.from_bytes(await asyncio.to_thread(store().get_blob, start.session_key))
        seed = msgspec.structs.replace(self.plan.seed, attempt=start.attempt)
        return harness.start(self.plan.task, sampling=self.plan.sampling, limits=self.plan.limits, seed=seed)

    async def _turns(self, harness: Harness, session: Session, start: RolloutStart) -> Outcome:
        policy = _Policy(self, prefer=self.home, session=f"{self.plan.group_id}/{start.attempt}")
        if session.done:  # its prompt alone fills the context
            await self._save(session, start, policy.prefer)
            return Outcome.ENDED
        tries = world_tries = 0
        while not self.clock.over:
            try:
                await harness.step(session, policy=policy, world=world_of(self.plan.environment))
            except (EngineBusy, VersionUnavailable, EngineUnreachable):
                tries += 1
                await asyncio.sleep(_backoff_s(tries))
                continue
            except WorldError:
                world_tries += 1
                if world_tries >= _WORLD_TRIES:
                    raise
                await asyncio.sleep(_backoff_s(world_tries + 3))
                continue
            tries = world_tries = 0
            if await self._save(session, start, policy.prefer):
                return Outcome.ENDED
        return Outcome.PAUSED

    async def _save(self, session: Session, start: RolloutStart, replica_id: uuid.UUID | None) -> bool:
        """Write the turn down; whether it was the last."""
        await self.in_database(functools.partial(self._write, session, start, replica_id))
        return session.done

    def _write(self, session: Session, start: RolloutStart, replica_id: uuid.UUID | None) -> None:
        """Blobs first, then the row that names them."""
        trajectory = session.trajectory
        texts = trajectory.versions()
        versions = versions_by_text(self.plan.lineage_id, texts)
        if len(versions) != len(texts):
            raise EnvironmentFault(f"a replica answered with a version of another run: {', '.join(texts)}")
        ordered = sorted(versions.values(), key=lambda version: (version.epoch, version.number))
        total = sum(len(segment.token_ids) for segment in trajectory.segments)
        progress = RolloutProgress(
            turns=session.turn,
            sampled_tokens=trajectory.sampled_tokens(),
            prompt_tokens=total - trajectory.sampled_tokens(),
            trajectory_key=store().put_blob(trajectory.to_bytes()),
            session_key="" if session.done else store().put_blob(session.to_bytes()),
            replica_id=replica_id,
            oldest_version=ordered[0] if ordered else None,
            newest_version=ordered[-1] if ordered else None,
        )
        if session.done and trajectory.ending is not None:
            rollout_finish(self.claim, rollout_id=start.rollout_id, progress=progress, ending=trajectory.ending)
        else:
            rollout_checkpoint(self.claim, rollout_id=start.rollout_id, progress=progress)

    async def _broken(self, start: RolloutStart, fault: Fault, error: RlCoreError) -> Outcome:
        log.warning("session_broken", rollout=str(start.rollout_id), fault=fault.value, error=str(error)[:300])
        self.error = error
        fail = functools.partial(rollout_fail, self.claim, rollout_id=start.rollout_id, fault=fault, error=str(error))
        await self.in_database(fail)
        return Outcome.BROKEN


@dataclass(slots=True)
class _Policy:
    """A session's view of the engines: its next turn goes where its last one went, if it may."""

    player: Player
    prefer: uuid.UUID | None
    session: str

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Generated:
        need = Need(self.player.plan, self.player.oldest())
        generated, self.prefer = await self.player.pool.generate(
            need,
            prefer=self.prefer,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            session=self.session,
        )
        return generated


@functools.lru_cache(maxsize=16)
def harness_of(environment: str, model_folder: str) -> Harness:
    """The turn loop of an environment under a model's template, made once a process. Raises: ModelError."""
    return Harness(ENVIRONMENTS[environment], ChatTokenizer.load(model_folder))


@functools.lru_cache(maxsize=16)
def world_of(environment: str) -> World:
    """The world that serves all sessions of the process. Raises: SandboxRefused where a layer is missing."""
    kind = ENVIRONMENTS[environment]
    return kind.open_world(SandboxClient(settings.SANDBOX_SOCKET) if kind.needs_sandbox else None)


def _backoff_s(tries: int) -> float:
    return float(min(_BACKOFF_CAP_S, _BACKOFF_S * 2 ** min(tries, 10)) * random.uniform(0.5, 1.0))
