"""The control queue: one alert to one hook, over https to an address that was checked, bounded in every way."""

from __future__ import annotations

import asyncio

import httpx
import structlog

from controlplane.services.destinations import Destination, destination_resolve
from controlplane.services.hooks import HookRefused, Notice, notice_answered, notice_of
from controlplane.states import WorkKind
from workers.base import Attempt, unit_task

log = structlog.get_logger(__name__)

TOTAL_S = 10.0
CONNECT_S = 5.0


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
    """The status of the hook's answer. Its body is not read, and no redirect is followed.

    The connection goes to the address that was checked; the name is what its certificate has to prove.
    Raises: HookRefused.
    """
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
    timeout = httpx.Timeout(TOTAL_S, connect=CONNECT_S)
    try:
        async with (
            asyncio.timeout(TOTAL_S),
            httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False, trust_env=False) as client,
            client.stream(
                "POST",
                destination.url,
                content=notice.body.encode(),
                headers={**notice.headers, "host": destination.netloc, "user-agent": "slipway"},
                extensions={"sni_hostname": destination.host},
            ) as response,
        ):
            return response.status_code
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        raise HookRefused(f"{notice.delivery.hook.shown} did not answer: {type(error).__name__}: {error}") from error
