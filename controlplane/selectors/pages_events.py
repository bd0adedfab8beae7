"""Reads for the pages: the event log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Q

from controlplane.models import Event, Project, Topic
from controlplane.states import EventType

PAGE = 50
CHATTER = (
    EventType.GROUP_CHANGED,
    EventType.ROLLOUT_CHANGED,
    EventType.METRICS_RECORDED,
    EventType.TRANSFER_CHANGED,
    EventType.REPLICA_TARGETED,
)


def topic_seqs(names: Iterable[str]) -> dict[str, int]:
    """Where each topic stands now; 0 for one that has no event yet."""
    wanted = list(names)
    known = dict(Topic.objects.filter(name__in=wanted).values_list("name", "seq"))
    return {name: known.get(name, 0) for name in wanted}


@dataclass(frozen=True, slots=True)
class EventFilter:
    """What the events page was asked for. Empty means all."""

    type: str = ""
    by: str = ""
    actor: str = ""
    topic: str = ""
    reason: str = ""
    before: int | None = None
    quiet: bool = False  # leave out what happens many times in every step


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events, newest first, and the id before which older ones lie (None: there are none)."""

    events: list[Event]
    older: int | None


def events_page(project: Project, wanted: EventFilter, size: int = PAGE) -> EventPage:
    """One page of a project's events, newest first, by key: its cost does not grow with its depth."""
    query = Q(project=project)
    if wanted.type:
        query &= Q(type__startswith=wanted.type)
    if wanted.quiet:
        query &= ~Q(type__in=CHATTER)
    if wanted.by:
        query &= Q(actor_kind=wanted.by)
    if wanted.actor:
        query &= Q(actor__icontains=wanted.actor)
    if wanted.topic:
        query &= Q(topic_id=wanted.topic)
    if wanted.reason:
        query &= Q(reason__icontains=wanted.reason)
    if wanted.before is not None:
        query &= Q(pk__lt=wanted.before)
    rows = list(Event.objects.filter(query).order_by("-pk")[: size + 1])
    return EventPage(rows[:size], rows[size - 1].pk if len(rows) > size else None)


def topic_tail(topic: str, size: int = 30) -> list[Event]:
    """The newest events of one topic, newest first."""
    return list(Event.objects.filter(topic_id=topic).order_by("-seq")[:size])
