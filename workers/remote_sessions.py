"""Watching over a session that a remote environment plays: started, looked at, taken in or ended, in slices."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog
from django.conf import settings

from controlplane.errors import ControlPlaneError
from controlplane.selectors.rollout_plans import RolloutPlan, RolloutStart
from controlplane.services.rollout_sessions import (
    OpenSession,
    SessionStanding,
    calls_of,
    rollout_session_accepted,
    rollout_session_end,
    rollout_session_open,
    rollout_session_report,
    rollout_session_standing,
    session_key,
)
from controlplane.services.work import Claim
from rl_core.environments.remote.capture import Captured, assemble
from rl_core.environments.remote.client import RemoteClient
from rl_core.environments.remote.environment import Remote
from rl_core.environments.remote.messages import Result, SessionTold
from rl_core.environments.remote.protocol import Ask, SessionState
from rl_core.errors import (
    EnvironmentFault,
    RemoteBusy,
    RemoteEnded,
    RemoteFailed,
    RlCoreError,
    WorldError,
)
from rl_core.types import Fault, Role, Trajectory
from workers.base import store
from workers.progress import InDatabase, Outcome, ProgressWriter, SliceClock

log = structlog.get_logger(__name__)

LOOK_S = 0.25
ASK_S = 5.0
PATIENCE_S = 5.0
MODEL = "policy"


@dataclass(slots=True)
class RemoteWatch:
    """Watches over one session of a remote environment. `calls` are those read so far: none changes any more."""

    claim: Claim
    plan: RolloutPlan
    remote: Remote
    clock: SliceClock
    in_database: InDatabase
    writer: ProgressWriter
    calls: list[Captured] = field(default_factory=list)

    async def play(self, start: RolloutStart) -> Outcome:
        """Until the session ended or the slice is over. Raises: EnvironmentFault, whose session has ended then."""
        opening = functools.partial(
            rollout_session_open, self.claim, rollout_id=start.rollout_id, slug=self.plan.environment
        )
        session = await self.in_database(opening)
        assert isinstance(session, OpenSession)
        client = RemoteClient(self.remote.place)
        try:
            if not session.accepted and not await self._started(client, session):
                return Outcome.PAUSED
            return await self._watch(client, session, start)
        except RlCoreError as error:
            await self._give_up(client, session.id, f"{error.code}: {error}")
            raise

    async def _started(self, client: RemoteClient, session: OpenSession) -> bool:
        """Ask until it is taken; whether it was before the slice was over. A full environment is no failure."""
        patient = RemoteClient(client.place, patience_s=PATIENCE_S)
        while True:
            try:
                await self._start(patient, session)
            except RemoteBusy:
                standing = await self.in_database(functools.partial(rollout_session_standing, session.id))
                assert isinstance(standing, SessionStanding)
                if standing.expired:
                    raise
                if self.clock.over:
                    return False
            else:
                return True

    async def _start(self, client: RemoteClient, session: OpenSession) -> None:
        """Ask the environment to play it; asking again is asking once."""
        task, limits = self.plan.task, self.plan.limits
        base = settings.PUBLIC_URL.rstrip("/")
        if not base:
            raise WorldError("PUBLIC_URL is not set: a remote environment has to be told where to find the policy")
        told = await client.ask(
            Ask.SESSION_START,
            SessionTold,
            session=str(session.id),
            task=msgspec.to_builtins(task),
            model={"base_url": f"{base}/rollouts/v1", "api_key": session_key(session.id), "name": MODEL},
            limits={
                "max_turns": limits.max_turns,
                "max_context_tokens": limits.max_context_tokens,
                "max_tokens": self.plan.sampling.max_tokens,
            },
            deadline_s=self.remote.session_s,
            callback=f"{base}/rollouts/v1/sessions/{session.id}/result",
        )
        await self.in_database(functools.partial(rollout_session_accepted, session.id, session_s=self.remote.session_s))
        log.info("remote_session_started", session=str(session.id), state=told.state.value)

    async def _watch(self, client: RemoteClient, session: OpenSession, start: RolloutStart) -> Outcome:
        asked_s, calls, last_look = time.monotonic(), 0, False
        while True:
            standing = await self.in_database(functools.partial(rollout_session_standing, session.id))
            assert isinstance(standing, SessionStanding)
            if standing.result is not None:
                await self._take_in(session.id, start, standing.result)
                return Outcome.ENDED
            if standing.ended:
                raise RemoteEnded(f"the session ended without a result: {standing.reason or 'no reason was noted'}")
            if standing.expired and not last_look:  # its result may have come while nobody was there to take it
                last_look = True
                await self._ask(RemoteClient(client.place, answer_s=5.0, patience_s=0.0), session.id)
                continue
            if standing.expired:
                raise RemoteEnded(f"the session took longer than the {self.remote.session_s:g} s that it may")
            if standing.calls != calls:
                calls = standing.calls
                await self._save(session.id, start)
            if self.clock.over:
                return Outcome.PAUSED
            if time.monotonic() - asked_s >= ASK_S:
                asked_s = time.monotonic()
                await self._ask(client, session.id)
            await asyncio.sleep(LOOK_S)

    async def _ask(self, client: RemoteClient, session_id: uuid.UUID) -> None:
        """Its result may have been lost on the way. An environment that does not answer now is asked again later."""
        try:
            told = await client.ask(Ask.SESSION_STATUS, SessionTold, session=str(session_id))
        except WorldError as error:
            log.warning("remote_session_unseen", session=str(session_id), error=str(error)[:300])
            return
        if told.state is SessionState.CANCELLED:
            raise RemoteEnded("the environment cancelled the session")
        if told.result is not None:
            with suppress(ControlPlaneError):  # the callback was faster: the next look sees it
                await self.in_database(
                    functools.partial(rollout_session_report, session_id=session_id, result=told.result)
                )

    async def _take_in(self, session_id: uuid.UUID, start: RolloutStart, result: Result) -> None:
        """The trajectory with what was reported. Raises: RemoteFailed, WorldError: the environment says so."""
        if result.error is not None:
            text = f"{self.plan.environment} reports: {result.error.message[:400] or 'no reason'}"
            raise WorldError(text) if result.error.fault is Fault.INFRASTRUCTURE else RemoteFailed(text)
        trajectory = await self._trajectory(session_id, result)
        if not trajectory.sampled_tokens():
            raise RemoteFailed(f"{self.plan.environment} reports a reward without having asked the policy")
        await self._write(trajectory, start)

    async def _save(self, session_id: uuid.UUID, start: RolloutStart) -> None:
        """Show how far it is. The calls themselves are written down already, each as it was answered."""
        trajectory = await self._trajectory(session_id, None)
        await self._write(trajectory, start)

    async def _write(self, trajectory: Trajectory, start: RolloutStart) -> None:
        turns = sum(message.role is Role.ASSISTANT and message.segment >= 0 for message in trajectory.messages)
        await self.in_database(
            functools.partial(self.writer.write, trajectory, rollout_id=start.rollout_id, turns=turns)
        )

    async def _trajectory(self, session_id: uuid.UUID, result: Result | None) -> Trajectory:
        fresh = await self.in_database(functools.partial(calls_of, session_id, store(), since=len(self.calls)))
        assert isinstance(fresh, list)
        self.calls += fresh
        return assemble(
            task_id=self.plan.task.id,
            calls=self.calls,
            sampling=self.plan.sampling,
            ending=(result.ending if result else None),
            reported=result.reported if result else {},
        )

    async def _give_up(self, client: RemoteClient, session_id: uuid.UUID, reason: str) -> None:
        """End the session and its key, and tell the environment, which may not hear it. Raises: StaleFence."""
        end = functools.partial(rollout_session_end, session_id=session_id, reason=reason, claim=self.claim)
        await self.in_database(end)
        hasty = RemoteClient(client.place, answer_s=5.0, patience_s=0.0)
        try:
            await hasty.ask(Ask.SESSION_CANCEL, SessionTold, session=str(session_id))
        except (EnvironmentFault, ValueError) as error:
            log.info("remote_session_not_cancelled", session=str(session_id), error=str(error)[:200])
