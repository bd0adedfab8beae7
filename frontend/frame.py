"""The frame around every page: navigation, project switch, and the topics that the page follows live."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.selectors.pages_events import topic_seqs
from controlplane.services.events import project_topic
from frontend.access import Access, request_memberships
from frontend.navigation import navigation


def follow(access: Access, *topics: str) -> dict[str, int]:
    """The project's topic and further ones, each with the seq it stands at.

    Call it before reading what the page shows: an event in between is then seen twice, never missed.
    """
    return topic_seqs((project_topic(access.project.pk), *topics))


def show(
    request: HttpRequest,
    access: Access,
    template: str,
    context: dict[str, Any],
    *,
    section: str,
    live: dict[str, int] | None = None,
    status: int = 200,
) -> HttpResponse:
    """Render a page inside the frame. `live` comes from `follow`; without it the page does not move by itself."""
    framed = {
        "access": access,
        "section": section,
        "navigation": navigation(access.role),
        "projects": [membership.project for membership in request_memberships(request)],
        "live_topics": live or {},
        **context,
    }
    return render(request, template, framed, status=status)
