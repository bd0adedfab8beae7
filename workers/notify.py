"""The control queue: one alert to one hook, over https to an address that was checked, bounded in every way."""

from __future__ import annotations

import asyncio

import structlog

from controlplane.services.destinations import destination_resolve
from controlplane.services.hooks import HookRefused, Notice, notice_answered, notice_of
from controlplane.states import WorkKind
from rl_core import destinations
from rl_core.destinations import Destination
from rl_core.errors import DestinationUnreached
from workers.base import Attempt, unit_task

log = structlog.get_logger(__name__)

TOTAL_S = 10.0


@unit_task(WorkKind.NOTIFY)
def notify(attempt: Attempt) -> None:
    """One delivery. Any answer but success is a failure, tried again with growing pauses."""
    notice = notice_of(attempt.claim)
    if notice is None:
        return
    status = asyncio.run(post(notice, destination_resolve(notice.url)))
    attempt.check()
    notice_answered(attempt.claim, notice=notice, status=status)
    log.info("alert_delivered", delivery=str(notice.delivery.pk), status=status)


async def post(notice: Notice, destination: Destination) -> int:
    """The status of the hook's answer; its body is not read. Raises: HookRefused."""
    try:
        answer = await destinations.post(
            destination, body=notice.body.encode(), headers=notice.headers, timeout_s=TOTAL_S
        )
    except DestinationUnreached as error:
        raise HookRefused(f"{notice.delivery.hook.shown}: {error}") from error
    return answer.status
