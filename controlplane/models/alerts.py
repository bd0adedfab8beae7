"""Alerts: what a lane's monitors found, who took it, and where it was sent."""

from __future__ import annotations

from urllib.parse import urlsplit

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.lanes import Lane
from controlplane.models.tenancy import Project, User
from controlplane.states import AlertKind


class Alert(Entity):
    """Something that a person has to look at. One that holds keeps its lane's cadence still until it is resolved."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="alerts")
    lane = models.ForeignKey(Lane, null=True, on_delete=models.CASCADE, related_name="alerts")
    kind = models.CharField(max_length=20, choices=AlertKind.choices)
    subject = models.CharField(max_length=100, help_text="what it is about; one open alert for each kind and subject")
    detail = models.JSONField(default=dict)
    holds = models.BooleanField(default=False)
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    resolution = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "lane", "kind", "subject"],
                name="one_open_alert",
                condition=models.Q(resolved_at__isnull=True),
                nulls_distinct=False,
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind}:{self.subject}"


class AlertHook(Entity):
    """Where a project's alerts are posted, signed as Standard Webhooks says. The secret is kept encrypted."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="alert_hooks")
    url = models.URLField(max_length=500)
    sealed_secret = models.TextField()
    disabled_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.shown

    @property
    def shown(self) -> str:
        """What people, logs and events get to see: of many services, whoever knows the whole address may post there."""
        parts = urlsplit(self.url)
        hidden = self.url.partition(parts.netloc)[2].strip("/")
        return f"{parts.scheme}://{parts.netloc}/" + (f"…{hidden[-4:]}" if len(hidden) > 12 else "…" if hidden else "")


class AlertDelivery(Entity):
    """One alert on its way to one hook; a unit of work carries it there."""

    alert = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="deliveries")
    hook = models.ForeignKey(AlertHook, on_delete=models.CASCADE, related_name="deliveries")
    status = models.PositiveSmallIntegerField(null=True, help_text="the last answer's HTTP status")
    delivered_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["alert", "hook"], name="alert_delivery_once")]

    def __str__(self) -> str:
        return f"{self.alert_id}:{self.hook_id}"
