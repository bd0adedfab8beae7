"""The Celery application. Tasks live in `workers`; this side sends them by name."""

from __future__ import annotations

from celery import Celery
from django.conf import settings
from kombu import Queue as KombuQueue

from controlplane.states import Queue

# A hard limit above every lease-bounded slice; the broker's visibility timeout lies above it.
TASK_TIME_LIMIT_S = 600
# The limit of training steps, and of what goes over a whole version's weights in one piece. When the broker sends such
# a task again meanwhile, the unit is leased, and the message does nothing.
VERSION_TIME_LIMIT_S = 12 * 3600
# Before the limit a task is told, and fails in good order.
GRACE_S = 30
VISIBILITY_TIMEOUT_S = 3600

app = Celery("slipway")
app.conf.update(
    broker_url=settings.BROKER_URL,
    include=["workers"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    worker_soft_shutdown_timeout=5,
    worker_cancel_long_running_tasks_on_connection_loss=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        "unacked_restore_interval": 5,
        "unacked_restore_limit": 1000,
        "socket_connect_timeout": 3,
        "socket_timeout": 30,
        "retry_on_timeout": True,
    },
    task_queues=[KombuQueue(queue.value) for queue in Queue],
    task_default_queue=Queue.CONTROL.value,
    task_create_missing_queues=False,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
)
