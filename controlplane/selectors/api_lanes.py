"""Reads for the API: lanes and all that belongs to them."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.models import (
    Alert,
    AlertDelivery,
    AlertHook,
    CadenceSlot,
    CanaryStep,
    Feedback,
    FeedbackSource,
    Generation,
    Lane,
    Project,
    RejectedPayload,
    Release,
    ServedVersion,
    SignalDefinition,
    SignalMap,
)


def lanes_of(project: Project) -> QuerySet[Lane]:
    """Lanes of the project."""
    rows = Lane.objects.filter(project=project)
    return rows.select_related("cluster", "model", "promoted_version", "rollback_to", "project")


def releases_of(project: Project) -> QuerySet[Release]:
    """Releases of all its lanes."""
    rows = Release.objects.filter(lane__project=project)
    rows = rows.select_related("lane__project", "lane__cluster", "version", "incumbent", "proposer", "run")
    return rows.prefetch_related("approvals__user")


def steps_of(release: Release) -> QuerySet[CanaryStep]:
    """The steps of its canary."""
    return CanaryStep.objects.filter(release=release)


def slots_of(lane: Lane) -> QuerySet[CadenceSlot]:
    """Turns of the lane's cadence."""
    return CadenceSlot.objects.filter(lane=lane).select_related("lane")


def alerts_of(project: Project) -> QuerySet[Alert]:
    """Alerts, open and resolved."""
    return Alert.objects.filter(project=project).select_related("lane", "resolved_by", "project")


def hooks_of(project: Project) -> QuerySet[AlertHook]:
    """Where alerts are posted."""
    return AlertHook.objects.filter(project=project)


def deliveries_of(project: Project) -> QuerySet[AlertDelivery]:
    """Alerts on their way to hooks."""
    return AlertDelivery.objects.filter(alert__project=project).select_related("hook")


def served_of(lane: Lane) -> QuerySet[ServedVersion]:
    """What the lane served, and when."""
    return ServedVersion.objects.filter(lane=lane).select_related("version")


def generations_of(project: Project) -> QuerySet[Generation]:
    """Generations of all its lanes."""
    return Generation.objects.filter(lane__project=project).select_related("lane", "version")


def feedback_of(project: Project) -> QuerySet[Feedback]:
    """Feedback events."""
    return Feedback.objects.filter(project=project).select_related("signal")


def signals_of(project: Project) -> QuerySet[SignalDefinition]:
    """Defined signals."""
    return SignalDefinition.objects.filter(project=project)


def signal_maps_of(project: Project) -> QuerySet[SignalMap]:
    """Versions of the signal map."""
    return SignalMap.objects.filter(project=project).select_related("author")


def sources_of(project: Project) -> QuerySet[FeedbackSource]:
    """Webhook sources."""
    return FeedbackSource.objects.filter(project=project)


def rejected_of(project: Project) -> QuerySet[RejectedPayload]:
    """Refused payloads."""
    return RejectedPayload.objects.filter(project=project).select_related("project")
