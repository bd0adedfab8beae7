"""Reading the event log: what a subscriber has not seen yet, in order."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.models import Event, Project, Topic

ENVELOPE_VERSION = 1


def event_envelope(event: Event) -> dict[str, Any]:
    """The one form in which an event leaves: {v, topic, seq, type, ts, data}; data also names actor and reason."""
    return {
        "v": ENVELOPE_VERSION,
        "topic": event.topic_id,
        "seq": event.seq,
        "type": event.type,
        "ts": event.at.isoformat().replace("+00:00", "Z"),
        "data": {
            **event.data,
            "actor": {"kind": event.actor_kind, "name": event.actor},
            "reason": event.reason,
        },
    }


def topic_find(name: str) -> Topic | None:
    """The topic with its project, or None."""
    return Topic.objects.select_related("project").filter(name=name).first()


def events_after(*, topic: str, after: int, limit: int) -> list[Event]:
    """At most `limit` events with `seq > after`, in order.

    Appends hold a lock on the topic's counter until they commit, so whoever sees `seq` n can see all before it: a
    page that begins at `after + 1` has no hole, now or later.
    """
    return list(Event.objects.filter(topic_id=topic, seq__gt=after).order_by("seq")[:limit])


def events_of(project: Project) -> QuerySet[Event]:
    """The whole log of a project, for browsing."""
    return Event.objects.filter(project=project)
