"""Reads for the pages: what users say, how it comes in, who sends it, what was refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, Q

from controlplane.models import (
    ApiKey,
    Feedback,
    FeedbackSource,
    Lane,
    Project,
    RejectedPayload,
    SignalDefinition,
    SignalMap,
    User,
)
from controlplane.selectors.feedback_health import FeedbackHealth, Intake, feedback_health

PAGE = 50
REJECTED = 100


@dataclass(frozen=True, slots=True)
class SignalCount:
    """How often a signal took a value."""

    signal: str
    value: object
    count: int


@dataclass(frozen=True, slots=True)
class SenderRow:
    """What one sender sent in the time looked back."""

    sender: str
    name: str
    source: FeedbackSource | None
    intake: Intake


@dataclass(frozen=True, slots=True)
class FeedbackView:
    """All that the feedback page shows. Rates and counts are those of the last week."""

    events: list[Feedback]
    names: dict[str, str]
    health: FeedbackHealth
    senders: list[SenderRow]
    by_signal: list[SignalCount]
    signals: list[SignalDefinition]
    signal_map: SignalMap | None
    sources: list[FeedbackSource]
    rejected: list[RejectedPayload]
    lane: Lane | None


def feedback_view(project: Project, *, state: str = "", signal: str = "", sender: str = "") -> FeedbackView:
    """The newest events with the given state, signal and sender (empty: all), and how feedback stands as a whole."""
    health = feedback_health(project)
    sources = list(FeedbackSource.objects.filter(project=project).order_by("slug"))
    by_slug = {source.slug: source for source in sources}
    events = _events(project, state=state, signal=signal, sender=sender)
    rejected = list(RejectedPayload.objects.filter(project=project).order_by("-created_at", "-id")[:REJECTED])
    sent = {*health.by_sender, *(event.sender for event in events), *(row.sender for row in rejected)}
    names = sender_names(project, sent)
    return FeedbackView(
        events=events,
        names=names,
        health=health,
        senders=[SenderRow(key, names[key], by_slug.get(key), intake) for key, intake in health.by_sender.items()],
        by_signal=_by_signal(project),
        signals=list(SignalDefinition.objects.filter(project=project).order_by("slug")),
        signal_map=SignalMap.objects.filter(project=project).order_by("-number").first(),
        sources=sources,
        rejected=rejected,
        lane=Lane.objects.filter(project=project).order_by("slug").first(),
    )


def _events(project: Project, *, state: str, signal: str, sender: str) -> list[Feedback]:
    rows = Feedback.objects.filter(project=project)
    if state:
        rows = rows.filter(state=state)
    if signal:
        rows = rows.filter(signal__slug=signal)
    if sender:
        rows = rows.filter(sender=sender)
    return list(rows.select_related("signal", "source").order_by("-created_at", "-id")[:PAGE])


def _by_signal(project: Project) -> list[SignalCount]:
    """Values of the newest events, by signal: enough to see what comes."""
    newest = Feedback.objects.filter(project=project).order_by("-created_at").values("id")[:5000]
    rows = Feedback.objects.filter(project=project, id__in=newest).values_list("signal__slug", "value")
    counted = rows.annotate(count=Count("id")).order_by("signal__slug", "-count")[:PAGE]
    return [SignalCount(slug, value, count) for slug, value, count in counted]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source, with what it sent in the time looked back and the keys that speak for it."""

    source: FeedbackSource
    intake: Intake
    keys: int


def sources_view(project: Project) -> list[SourceRow]:
    """The project's sources, by name."""
    health = feedback_health(project)
    live = Count("keys", filter=Q(keys__revoked_at__isnull=True))
    rows = FeedbackSource.objects.filter(project=project).annotate(live_keys=live).order_by("slug")
    return [SourceRow(row, health.by_sender.get(row.slug, Intake()), row.live_keys) for row in rows]


def sender_names(project: Project, senders: Iterable[str]) -> dict[str, str]:
    """How people know senders: a source by its name, an API key by the name that it was given, a person by theirs."""
    known = list(senders)
    keys = ApiKey.objects.filter(project=project, pk__in=_key_ids(known)).values_list("pk", "name")
    people = [name.removeprefix("user:") for name in known if name.startswith("user:") and name[5:].isdigit()]
    users = User.objects.filter(pk__in=people, memberships__project=project).values_list("pk", "username")
    names = {f"key:{pk}": f"key {name}" for pk, name in keys} | {f"user:{pk}": name for pk, name in users}
    return {sender: names.get(sender, sender) for sender in known}


def _key_ids(senders: Iterable[str]) -> list[UUID]:
    found = []
    for sender in senders:
        try:
            found.append(UUID(sender.removeprefix("key:") if sender.startswith("key:") else ""))
        except ValueError:
            continue
    return found
