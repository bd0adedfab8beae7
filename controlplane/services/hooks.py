"""Alert hooks: where a project's alerts are posted, and what becomes of each delivery.

The message is signed as Standard Webhooks says; its id is the delivery's, the same at every try.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import transaction
from django.db.models.functions import Now
from standardwebhooks.webhooks import Webhook

from controlplane.errors import ControlPlaneError
from controlplane.models import Alert, AlertDelivery, AlertHook, Project
from controlplane.services.destinations import destination_check
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.sealing import seal, signing_secret, unseal
from controlplane.services.work import Claim, work_cancel, work_fenced, work_finish
from controlplane.states import ActorKind, EventType, WorkKind

PURPOSE = "alert_hooks"
NOTIFIER = Actor(ActorKind.WORKER, "notify")
GONE = 410


class HookRefused(ControlPlaneError):
    """A hook did not take its alert: it answered with an error, not in time, or not at all."""

    code: ClassVar[str] = "hook_refused"
    http_status: ClassVar[int] = 502
    retryable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Notice:
    """One message to one hook, signed."""

    delivery: AlertDelivery
    url: str
    body: str
    headers: dict[str, str]


@transaction.atomic
def hook_create(*, project: Project, url: str, actor: Actor) -> tuple[AlertHook, str]:
    """Add a hook. Its secret is returned once (`whsec_…`). Raises: Invalid for a destination that is not allowed."""
    destination_check(url)
    secret = signing_secret()
    hook = AlertHook.objects.create(project=project, url=url, sealed_secret=seal(secret, purpose=PURPOSE))
    _record(hook, actor=actor, reason="", enabled=True)
    return hook, secret


@transaction.atomic
def hook_disable(*, hook: AlertHook, actor: Actor, reason: str) -> AlertHook:
    """Send nothing to the hook any more; what still waits for it is not sent. Doing it twice is doing it once."""
    if AlertHook.objects.filter(pk=hook.pk, disabled_at__isnull=True).update(disabled_at=Now()):
        waiting = hook.deliveries.filter(delivered_at__isnull=True).values_list("pk", flat=True)
        work_cancel(kind=WorkKind.NOTIFY, refs=list(waiting))
        _record(hook, actor=actor, reason=reason, enabled=False)
    hook.refresh_from_db()
    return hook


def notice_of(claim: Claim) -> Notice | None:
    """What the unit is to send; None when its hook was disabled, and the unit then ends."""
    delivery = AlertDelivery.objects.select_related("hook", "alert__lane", "alert__project").get(pk=claim.ref)
    if delivery.hook.disabled_at is not None or delivery.delivered_at is not None:
        with work_fenced(claim):
            work_finish(claim)
        return None
    sent_at = datetime.now(UTC)
    body = json.dumps(_message(delivery.alert), separators=(",", ":"))
    signer = Webhook(unseal(delivery.hook.sealed_secret, purpose=PURPOSE))
    headers = {
        "content-type": "application/json",
        "webhook-id": str(delivery.pk),
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": signer.sign(str(delivery.pk), sent_at, body),
    }
    return Notice(delivery, delivery.hook.url, body, headers)


def notice_answered(claim: Claim, *, notice: Notice, status: int) -> None:
    """What the hook answered. 410 means that nobody listens any more: the hook is disabled.

    Raises: HookRefused for any other answer than success, to be tried again; StaleFence.
    """
    with work_fenced(claim):
        AlertDelivery.objects.filter(pk=notice.delivery.pk).update(status=status)
        if 200 <= status < 300:
            AlertDelivery.objects.filter(pk=notice.delivery.pk).update(delivered_at=Now())
            work_finish(claim)
            return
        if status == GONE:
            work_finish(claim)
            hook_disable(hook=notice.delivery.hook, actor=NOTIFIER, reason="it answered 410: nobody listens")
            return
    raise HookRefused(f"{notice.delivery.hook.shown} answered {status}; the alert is sent again")


def _message(alert: Alert) -> dict[str, Any]:
    return {
        "type": f"alert.{alert.kind}",
        "timestamp": alert.created_at.isoformat(),
        "data": {
            "id": str(alert.pk),
            "project": alert.project.slug,
            "lane": alert.lane.slug if alert.lane else None,
            "kind": alert.kind,
            "subject": alert.subject,
            "holds": alert.holds,
            "detail": alert.detail,
        },
    }


def _record(hook: AlertHook, *, actor: Actor, reason: str, enabled: bool) -> None:
    event_append(
        project_id=hook.project_id,
        topic=project_topic(hook.project_id),
        event_type=EventType.ALERT_HOOK_CHANGED,
        actor=actor,
        reason=reason,
        data={"hook": str(hook.pk), "url": hook.shown, "enabled": enabled},
    )
