"""Alerts: listed, resolved; hooks that they are posted to."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import AlertFilter
from controlplane.api.serializers.alerts import (
    AlertSerializer,
    DeliverySerializer,
    HookInput,
    HookSecretSerializer,
    HookSerializer,
    ResolveInput,
)
from controlplane.api.serializers.base import ReasonInput
from controlplane.models import Alert, AlertDelivery, AlertHook
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.services import alerts, hooks


class AlertList(ListView):
    """Alerts, the newest first."""

    serializer_class = AlertSerializer
    filterset_class = AlertFilter

    def rows(self) -> QuerySet[Alert]:
        """Alerts."""
        return select.alerts_of(self.project)


class AlertDetail(DetailView):
    """One alert."""

    serializer_class = AlertSerializer

    def row(self) -> Alert:
        """The alert of the path."""
        alert: Alert = one(select.alerts_of(self.project), "alert", pk=self.kwargs["id"])
        return alert


class AlertResolve(ActionView):
    """A person has looked: the alert closes, and its lane goes on unless another alert holds it."""

    actions = {"POST": Action.RELEASES_APPROVE}
    serializer_class = AlertSerializer
    input_serializer = ResolveInput

    def perform(self, data: dict[str, Any]) -> Alert:
        """Resolve it."""
        alert = one(select.alerts_of(self.project), "alert", pk=self.kwargs["id"])
        return alerts.alert_resolve(alert=alert, user=self.principal.user, actor=self.actor, reason=data["reason"])


class AlertDeliveryList(ListView):
    """One alert on its way to each hook."""

    serializer_class = DeliverySerializer

    def rows(self) -> QuerySet[AlertDelivery]:
        """Deliveries."""
        alert = one(select.alerts_of(self.project), "alert", pk=self.kwargs["id"])
        return select.deliveries_of(self.project).filter(alert=alert)


class HookList(Post, ListView):
    """Hooks. POST adds one and answers with its secret, once."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = HookSerializer
    input_serializer = HookInput
    answer_serializer = HookSecretSerializer
    secret_fields = frozenset({"secret"})

    def rows(self) -> QuerySet[AlertHook]:
        """Hooks."""
        return select.hooks_of(self.project)

    def perform(self, data: dict[str, Any]) -> AlertHook:
        """Add it."""
        hook, secret = hooks.hook_create(project=self.project, url=data["url"], actor=self.actor)
        hook.refresh_from_db()
        hook.secret = secret  # type: ignore[attr-defined]
        return hook


class HookDisable(ActionView):
    """Send nothing to a hook any more."""

    actions = {"POST": Action.LANES_MANAGE}
    serializer_class = HookSerializer
    input_serializer = ReasonInput

    def perform(self, data: dict[str, Any]) -> AlertHook:
        """Disable it."""
        hook = one(select.hooks_of(self.project), "hook", pk=self.kwargs["id"])
        return hooks.hook_disable(hook=hook, actor=self.actor, reason=data["reason"])
