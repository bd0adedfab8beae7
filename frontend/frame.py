"""The frame around every page: navigation, project switch, and the topics that the page follows live."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers

from controlplane.selectors.pages_alerts import alerts_open
from controlplane.selectors.pages_events import topic_seqs
from controlplane.services.events import project_topic
from frontend.access import Access, request_memberships
from frontend.navigation import navigation

FRAGMENT_HEADER = "X-Slipway-Fragment"


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
    part: str = "",
    status: int = 200,
) -> HttpResponse:
    """Render a page inside the frame. `live` comes from `follow`; without it the page does not move by itself.

    `part` names the template of the page's moving part, which is rendered alone when the page asks for it again.
    """
    if part and request.headers.get(FRAGMENT_HEADER):
        response = render(request, part, {"access": access, **context}, status=status)
        patch_vary_headers(response, [FRAGMENT_HEADER])
        return response
    framed = {
        "access": access,
        "section": section,
        "navigation": navigation(access.role),
        "projects": [membership.project for membership in request_memberships(request)],
        "live_topics": live or {},
        "alerts_open": alerts_open(access.project),
        **context,
    }
    response = render(request, template, framed, status=status)
    if part:
        patch_vary_headers(response, [FRAGMENT_HEADER])
    return response
