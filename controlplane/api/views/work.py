"""Events, units of work, attempts, dead letters."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter

from controlplane.api.base import ActionView, DetailView, ListView, one
from controlplane.api.filters import AttemptFilter, EventFilter, WorkFilter
from controlplane.api.pagination import Keyset, page_size
from controlplane.api.serializers.work import (
    AttemptSerializer,
    EventsAfterSerializer,
    EventSerializer,
    ReplayInput,
    WorkSerializer,
)
from controlplane.errors import Invalid, NotFound
from controlplane.models import Attempt, Event, WorkUnit
from controlplane.permissions import Action
from controlplane.selectors import api_work as select
from controlplane.selectors.api_events import event_envelope, events_after, events_of, topic_find
from controlplane.services.work import work_replay

MAX_EVENTS = 500
MAX_SEQ_DIGITS = 18


class EventList(ListView):
    """The project's event log, newest first."""

    serializer_class = EventSerializer
    filterset_class = EventFilter
    keyset = Keyset("id", int)

    def rows(self) -> QuerySet[Event]:
        """Events."""
        return events_of(self.project)


class EventsAfter(DetailView):
    """Events of one topic after a `seq`, in order, without a gap: what a websocket client missed."""

    project_scoped = False
    serializer_class = EventsAfterSerializer
    query = frozenset({"topic", "after", "limit"})
    documented = (
        OpenApiParameter("topic", {"type": "string", "maxLength": 80, "minLength": 1}, required=True),
        OpenApiParameter("after", {"type": "integer", "minimum": 0, "maximum": 10**18 - 1, "default": 0}),
        OpenApiParameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_EVENTS, "default": MAX_EVENTS}),
    )

    def row(self) -> dict[str, Any]:
        """One page of the topic."""
        name = self.request.query_params.get("topic", "")
        if not name or len(name) > 80 or "\x00" in name:
            raise Invalid("topic is required, with at most 80 characters", "topic")
        after = self.request.query_params.get("after", "0")
        if not after.isascii() or not after.isdigit() or len(after) > MAX_SEQ_DIGITS:
            raise Invalid("after must be a whole number from 0", "after")
        limit = page_size(self.request, name="limit", default=MAX_EVENTS, most=MAX_EVENTS)
        topic = topic_find(name)
        if topic is None or not self.principal.may(topic.project, Action.READ):
            raise NotFound("there is no such topic, or you may not read it", "topic")
        found = events_after(topic=name, after=int(after), limit=limit)
        return {
            "topic": name,
            "seq": topic.seq,
            "next_after": found[-1].seq if found else int(after),
            "results": [event_envelope(event) for event in found],
        }


class WorkList(ListView):
    """Units of work."""

    serializer_class = WorkSerializer
    filterset_class = WorkFilter

    def rows(self) -> QuerySet[WorkUnit]:
        """Units."""
        return select.work_of(self.project)


class DeadLetterList(ListView):
    """Units that are out of attempts, or failed for good."""

    serializer_class = WorkSerializer
    filterset_class = WorkFilter

    def rows(self) -> QuerySet[WorkUnit]:
        """Dead units."""
        return select.dead_letters_of(self.project)


class WorkDetail(DetailView):
    """One unit of work."""

    serializer_class = WorkSerializer

    def row(self) -> WorkUnit:
        """The unit of the path."""
        unit: WorkUnit = one(select.work_of(self.project), "unit of work", pk=self.kwargs["id"])
        return unit


class WorkReplay(ActionView):
    """Give a dead letter a fresh set of attempts; 409 for one that is not dead."""

    actions = {"POST": Action.WORK_REPLAY}
    serializer_class = WorkSerializer
    input_serializer = ReplayInput

    def perform(self, data: dict[str, Any]) -> WorkUnit:
        """Replay it."""
        unit = one(select.work_of(self.project), "unit of work", pk=self.kwargs["id"])
        return work_replay(unit=unit, actor=self.actor, reason=data["reason"])


class AttemptList(ListView):
    """Tries at units of work."""

    serializer_class = AttemptSerializer
    filterset_class = AttemptFilter

    def rows(self) -> QuerySet[Attempt]:
        """Attempts, of one unit where the path names one."""
        attempts = select.attempts_of(self.project)
        if "id" not in self.kwargs:
            return attempts
        unit = one(select.work_of(self.project), "unit of work", pk=self.kwargs["id"])
        return attempts.filter(unit=unit)


class AttemptDetail(DetailView):
    """One attempt."""

    serializer_class = AttemptSerializer

    def row(self) -> Attempt:
        """The attempt of the path."""
        attempt: Attempt = one(select.attempts_of(self.project), "attempt", pk=self.kwargs["id"])
        return attempt
