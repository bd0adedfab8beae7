"""Reads for the pages: alerts, where they were sent, and the hooks that they are sent to."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, Max, Q

from controlplane.models import Alert, AlertDelivery, AlertHook, Lane, Project, WorkUnit
from controlplane.services.events import lane_topic
from controlplane.states import WorkKind, WorkState

RESOLVED = 50
OPEN = 200
FOLLOWED = 20


@dataclass(frozen=True, slots=True)
class HookRow:
    """One hook and how its deliveries go."""

    hook: AlertHook
    delivered: int
    waiting: int
    last_status: int | None


@dataclass(frozen=True, slots=True)
class AlertsView:
    """All that the alerts page shows."""

    open: list[Alert]
    resolved: list[Alert]
    hooks: list[HookRow]
    dead: set[UUID]


def alerts_view(project: Project, *, lane: UUID | None = None) -> AlertsView:
    """Open alerts, the newest resolved ones, and the hooks; of one lane when it is named."""
    rows = Alert.objects.filter(project=project).select_related("lane", "resolved_by")
    if lane is not None:
        rows = rows.filter(lane=lane)
    rows = rows.prefetch_related("deliveries__hook")
    opened = list(rows.filter(resolved_at__isnull=True).order_by("-holds", "-created_at")[:OPEN])
    resolved = list(rows.filter(resolved_at__isnull=False).order_by("-resolved_at")[:RESOLVED])
    deliveries = [row.pk for alert in (*opened, *resolved) for row in alert.deliveries.all()]
    dead = WorkUnit.objects.filter(kind=WorkKind.NOTIFY, ref__in=deliveries, state=WorkState.DEAD)
    return AlertsView(opened, resolved, _hooks(project), set(dead.values_list("ref", flat=True)))


def _hooks(project: Project) -> list[HookRow]:
    hooks = AlertHook.objects.filter(project=project).annotate(
        sent=Count("deliveries", filter=Q(deliveries__delivered_at__isnull=False)),
        waiting=Count("deliveries", filter=Q(deliveries__delivered_at__isnull=True)),
        newest=Max("deliveries__created_at"),
    )
    rows = list(hooks.order_by("disabled_at", "-created_at"))
    tried = AlertDelivery.objects.filter(hook__in=rows, status__isnull=False).order_by("hook", "-created_at")
    last = dict(tried.distinct("hook").values_list("hook", "status"))
    return [HookRow(row, row.sent, row.waiting, last.get(row.pk)) for row in rows]


def alerts_open(project: Project) -> int:
    """How many alerts wait for a person."""
    return Alert.objects.filter(project=project, resolved_at__isnull=True).count()


def lane_alerts(lane: Lane) -> list[Alert]:
    """Open alerts of one lane, those that hold it first."""
    return list(Alert.objects.filter(lane=lane, resolved_at__isnull=True).order_by("-holds", "-created_at"))


def lane_topics(project: Project) -> list[str]:
    """Topics of the project's lanes, for pages that show something of all of them."""
    lanes = Lane.objects.filter(project=project).order_by("slug").values_list("pk", flat=True)[:FOLLOWED]
    return [lane_topic(lane) for lane in lanes]
