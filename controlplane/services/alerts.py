"""Alerts: raised once while open, sent to the project's hooks, resolved by a person. One that holds stops its lane."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import Alert, AlertDelivery, AlertHook, Lane, Project, User
from controlplane.services.events import (
    CONDUCTOR,
    Actor,
    conductor_nudge,
    event_append,
    lane_topic,
    project_topic,
    require_reason,
)
from controlplane.services.lanes import lane_locked
from controlplane.services.work import work_enqueue_many
from controlplane.states import AlertKind, EventType, WorkKind

DELIVERY_FAILURES = 10


@transaction.atomic
def alert_raise(
    *,
    lane: Lane | None,
    kind: AlertKind,
    subject: str,
    detail: dict[str, Any],
    holds: bool = False,
    project: Project | None = None,
) -> Alert | None:
    """Call a person, unless the same kind and subject is open already; None then. `project` is the lane's by default.

    An alert that holds keeps the lane's cadence still until it is resolved. The caller has the lane locked, or does not
    hold it.
    """
    owner = lane.project if lane is not None else project
    assert owner is not None
    if lane is not None and holds:
        lane_locked(lane.pk)
    made = Alert.objects.bulk_create(
        [Alert(project=owner, lane=lane, kind=kind, subject=subject[:100], detail=detail, holds=holds)],
        ignore_conflicts=True,
    )
    alert = Alert.objects.filter(pk=made[0].pk).first()
    if alert is None:
        return None
    if lane is not None and holds:
        _hold(lane)
    hooks = AlertHook.objects.filter(project=owner, disabled_at__isnull=True)
    deliveries = AlertDelivery.objects.bulk_create(AlertDelivery(alert=alert, hook=hook) for hook in hooks)
    if deliveries:
        work_enqueue_many(
            kind=WorkKind.NOTIFY,
            refs=[delivery.pk for delivery in deliveries],
            project_id=owner.pk,
            max_failures=DELIVERY_FAILURES,
        )
    _record(alert, EventType.ALERT_RAISED, actor=CONDUCTOR, reason=str(detail.get("reason", "")))
    return alert


@transaction.atomic
def alert_resolve(*, alert: Alert, user: User | None, actor: Actor, reason: str) -> Alert:
    """A person has looked: the alert closes, and its lane goes on unless another holds it.

    Raises: Invalid without a reason; Conflict when it was resolved before.
    """
    require_reason(reason, "say what you found")
    lane = lane_locked(alert.lane_id) if alert.lane_id else None
    resolved = Alert.objects.filter(pk=alert.pk, resolved_at__isnull=True).update(
        resolved_at=Now(), resolved_by=user, resolution=reason[:500]
    )
    if not resolved:
        raise Conflict("the alert was resolved before")
    alert.refresh_from_db()
    if lane is not None and alert.holds:
        _hold(lane)
    _record(alert, EventType.ALERT_RESOLVED, actor=actor, reason=reason)
    conductor_nudge()
    return alert


def _hold(lane: Lane) -> None:
    """The lane's hold is what its oldest open alert that holds says; without one it goes on."""
    holding = Alert.objects.filter(lane=lane, holds=True, resolved_at__isnull=True).order_by("created_at").first()
    reason = f"{holding.kind} alert on {holding.detail.get('about', holding.subject)}"[:500] if holding else ""
    Lane.objects.filter(pk=lane.pk).exclude(hold_reason=reason).update(hold_reason=reason, revision=F("revision") + 1)


def _record(alert: Alert, event_type: EventType, *, actor: Actor, reason: str) -> None:
    event_append(
        project_id=alert.project_id,
        topic=lane_topic(alert.lane_id) if alert.lane_id else project_topic(alert.project_id),
        event_type=event_type,
        actor=actor,
        reason=reason,
        data={
            "alert": str(alert.pk),
            "kind": alert.kind,
            "subject": str(alert.detail.get("about", alert.subject)),
            "holds": alert.holds,
        },
    )
