"""Sessions of remote environments that nobody waits for any more: their run was stopped, or their group dropped."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

import structlog

from controlplane.models import RolloutSession
from controlplane.selectors.environments import remote_of
from controlplane.services.rollout_sessions import rollout_session_end
from controlplane.states import GroupState, RolloutState
from rl_core.environments.remote.client import RemoteClient, RemotePlace
from rl_core.environments.remote.messages import SessionTold
from rl_core.environments.remote.protocol import Ask
from rl_core.errors import EnvironmentFault

log = structlog.get_logger(__name__)

AT_ONCE = 50
ANSWER_S = 3.0


def sessions_release() -> None:
    """End them, and tell their environments, which may not hear it. Their keys were dead already."""
    wanted = RolloutSession.objects.filter(
        rollout__state=RolloutState.RUNNING, rollout__group__state=GroupState.RUNNING
    )
    orphans = RolloutSession.objects.filter(ended_at__isnull=True).exclude(pk__in=wanted.values("pk"))
    ended = [
        (session.pk, remote_of(session.environment).place)
        for session in orphans.select_related("environment").order_by("created_at")[:AT_ONCE]
        if rollout_session_end(session_id=session.pk, reason="its rollout is no longer wanted")
    ]
    if ended:
        asyncio.run(_cancel(ended))
        log.info("remote_sessions_released", sessions=len(ended))


async def _cancel(sessions: list[tuple[uuid.UUID, RemotePlace]]) -> None:
    asks = [
        partial(
            RemoteClient(place, answer_s=ANSWER_S, patience_s=0.0).ask, Ask.SESSION_CANCEL, SessionTold, session=str(pk)
        )
        for pk, place in sessions
    ]
    for told in await asyncio.gather(*(ask() for ask in asks), return_exceptions=True):
        if isinstance(told, EnvironmentFault):
            log.info("remote_session_not_cancelled", error=str(told)[:200])
        elif isinstance(told, BaseException):
            raise told
