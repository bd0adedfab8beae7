"""The event log: who changed what, when and why."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.selectors.pages_events import EventFilter, events_page
from controlplane.selectors.pages_runs import going_topics
from controlplane.states import ActorKind, EventType
from frontend.access import Access, page
from frontend.frame import follow, show
from frontend.queries import choice_of, text_of, whole_of


@require_safe
@page()
def event_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All events of the project, newest first."""
    live = follow(access, *going_topics(access.project))
    wanted = EventFilter(
        type=choice_of(request.GET, "type", EventType.values),
        by=choice_of(request.GET, "by", ActorKind.values),
        actor=text_of(request.GET, "actor"),
        topic=text_of(request.GET, "topic"),
        reason=text_of(request.GET, "reason"),
        before=whole_of(request.GET, "before"),
    )
    context = {
        "page": events_page(access.project, wanted),
        "wanted": wanted,
        "kinds": EventType.values,
        "actor_kinds": ActorKind.values,
    }
    return show(
        request, access, "frontend/events.html", context, section="events", live=live, part="frontend/events_part.html"
    )
