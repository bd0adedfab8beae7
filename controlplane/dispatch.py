"""From the outbox to the broker: due units are sent by task name. The broker only nudges; it may lose everything."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog
from kombu.exceptions import OperationalError

from controlplane.celery import app
from controlplane.models import WorkUnit
from controlplane.services.work import work_due, work_sent
from controlplane.states import Queue, WorkKind

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TaskRoute:
    """Which Celery task works on a kind of unit, and on which queue."""

    task: str
    queue: Queue


ROUTES: dict[WorkKind, TaskRoute] = {
    WorkKind.ROLLOUT: TaskRoute("workers.rollout", Queue.ROLLOUT),
    WorkKind.SCORE: TaskRoute("workers.score", Queue.SCORE),
    WorkKind.TRAIN: TaskRoute("workers.train", Queue.TRAIN),
    WorkKind.TRANSFER: TaskRoute("workers.transfer", Queue.TRANSFER),
    WorkKind.EXPORT: TaskRoute("workers.export", Queue.CONTROL),
    WorkKind.DERIVE: TaskRoute("workers.derive", Queue.CONTROL),
    WorkKind.SHADOW: TaskRoute("workers.shadow", Queue.ROLLOUT),
    WorkKind.PROVE: TaskRoute("workers.prove", Queue.SCORE),
    WorkKind.NOTIFY: TaskRoute("workers.notify", Queue.CONTROL),
}

BATCH = 200
_BACKOFF_CAP_S = 10.0


class Dispatcher:
    """Sends what is due. When the broker does not answer it says so once, waits longer each time, and goes on."""

    def __init__(self) -> None:
        self._failures = 0
        self._retry_at = 0.0

    def dispatch(self) -> int:
        """Send due units; returns how many the broker took. Never raises for a broker that is down."""
        if time.monotonic() < self._retry_at:
            return 0
        sent: list[WorkUnit] = []
        try:
            for unit in work_due(limit=BATCH):
                _send(unit)
                sent.append(unit)
        except (OperationalError, OSError) as error:
            self._failed(error)
        else:
            self._recovered(sent)
        work_sent(sent)
        return len(sent)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        delay_s = min(_BACKOFF_CAP_S, 0.5 * 2**self._failures)
        self._retry_at = time.monotonic() + delay_s
        if self._failures == 1:
            log.error(
                "broker_unreachable",
                error=str(error)[:200],
                next_step="work waits in PostgreSQL and is sent when the broker is back; start it or set BROKER_URL",
            )

    def _recovered(self, sent: list[WorkUnit]) -> None:
        if self._failures and sent:
            log.info("broker_back", after_tries=self._failures)
            self._failures = 0


def _send(unit: WorkUnit) -> None:
    route = ROUTES[WorkKind(unit.kind)]
    app.send_task(route.task, args=[str(unit.pk)], queue=route.queue.value, retry=False, ignore_result=True)
