"""Playing one session to its end, turn by turn, every turn written down before the next begins."""

from __future__ import annotations

import asyncio
import functools
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from django.conf import settings

from controlplane.selectors.rollout_plans import Need, RolloutPlan, RolloutStart
from controlplane.services.rollouts import (
    rollout_fail,
)
from controlplane.services.work import Claim
from rl_core.chat import ChatTokenizer
from rl_core.environments.blame import fault_of
from rl_core.environments.environment import Environment
from rl_core.environments.harness import Harness
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.remote.environment import Remote
from rl_core.environments.remote.protocol import Kind
from rl_core.environments.session import Session
from rl_core.environments.world import World
from rl_core.errors import (
    EngineBusy,
    EngineUnreachable,
    EnvironmentFault,
    RemoteBusy,
    RlCoreError,
    VersionUnavailable,
    WorldError,
)
from rl_core.sandbox.client import SandboxClient
from rl_core.types import Generated, SamplingParams, VersionRef
from workers.base import store
from workers.progress import InDatabase, Outcome, ProgressWriter, SliceClock
from workers.remote_sessions import RemoteWatch
from workers.replicas import ReplicaPool

log = structlog.get_logger(__name__)

_BACKOFF_S = 0.05
_BACKOFF_CAP_S = 2.0
_WORLD_TRIES = 3


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
        try:
            if self.plan.remote is not None and self.plan.remote.kind is Kind.ENVIRONMENT:
                return await self._watch(self.plan.remote).play(start)
            harness = harness_of(self.plan.environment, self.plan.model_folder, self.plan.remote)
            session = await self._open(harness, start)
            outcome = await self._turns(harness, session, start)
            if outcome is Outcome.ENDED:
                await self._close(session)
            return outcome
        except RlCoreError as error:
            return await self._broken(start, error)

    def _watch(self, remote: Remote) -> RemoteWatch:
        writer = ProgressWriter(self.claim, self.plan.lineage_id)
        return RemoteWatch(self.claim, self.plan, remote, self.clock, self.in_database, writer)

    async def _open(self, harness: Harness, start: RolloutStart) -> Session:
        if start.session_key:
            return Session.from_bytes(await asyncio.to_thread(store().get_blob, start.session_key))
        seed = msgspec.structs.replace(self.plan.seed, attempt=start.attempt)
        # The fence is in the key: a session that begins again, under another claim, begins in a world of its own.
        key = f"{start.rollout_id}.{self.claim.fence}"
        return harness.start(self.plan.task, sampling=self.plan.sampling, limits=self.plan.limits, seed=seed, key=key)

    async def _close(self, session: Session) -> None:
        """Tell the world that the session is over and written down. A world that does not hear it ends by itself."""
        if session.world_state is None:
            return
        try:
            await world_of(self.plan.environment, self.plan.remote).close(task=session.task, state=session.world_state)
        except EnvironmentFault as error:
            log.warning("world_not_closed", session=session.key, error=str(error)[:300])

    async def _turns(self, harness: Harness, session: Session, start: RolloutStart) -> Outcome:
        policy = _Policy(self, prefer=self.home, session=f"{self.plan.group_id}/{start.attempt}")
        if session.done:  # its prompt alone fills the context
            await self._save(session, start, policy.prefer)
            return Outcome.ENDED
        tries = world_tries = 0
        while not self.clock.over:
            try:
                await harness.step(session, policy=policy, world=world_of(self.plan.environment, self.plan.remote))
            except (EngineBusy, VersionUnavailable, EngineUnreachable, RemoteBusy):
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
        write = functools.partial(
            ProgressWriter(self.claim, self.plan.lineage_id).write,
            session.trajectory,
            rollout_id=start.rollout_id,
            turns=session.turn,
            session=None if session.done else session.to_bytes(),
            replica_id=replica_id,
        )
        await self.in_database(write)
        return session.done

    async def _broken(self, start: RolloutStart, error: RlCoreError) -> Outcome:
        fault = fault_of(error)
        log.warning("session_broken", rollout=str(start.rollout_id), fault=fault.value, error=str(error)[:300])
        if self.error is None or self.error.retryable:  # what cannot be helped ends the group, whoever else broke
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
def harness_of(environment: str, model_folder: str, remote: Remote | None = None) -> Harness:
    """The turn loop of an environment under a model's template, made once a process. Raises: ModelError."""
    return Harness(_kind_of(environment, remote), ChatTokenizer.load(model_folder))


@functools.lru_cache(maxsize=16)
def world_of(environment: str, remote: Remote | None = None) -> World:
    """The world that serves all sessions of the process. Raises: SandboxRefused where a layer is missing."""
    kind = _kind_of(environment, remote)
    return kind.open_world(SandboxClient(settings.SANDBOX_SOCKET) if kind.needs_sandbox else None)


def _kind_of(environment: str, remote: Remote | None) -> Environment:
    return remote.environment if remote is not None else ENVIRONMENTS[environment]


def _backoff_s(tries: int) -> float:
    return float(min(_BACKOFF_CAP_S, _BACKOFF_S * 2 ** min(tries, 10)) * random.uniform(0.5, 1.0))
