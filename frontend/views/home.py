"""Home: what runs, what is wrong, what happened last."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.selectors.pages_alerts import lane_topics
from controlplane.selectors.pages_events import EventFilter, events_page
from controlplane.selectors.pages_fleet import clusters_view
from controlplane.selectors.pages_runs import RunFilter, going_runs, going_topics, run_ingredients, runs_page
from controlplane.selectors.pages_work import problems_of
from frontend.access import SESSION_KEY, Access, access_of, page
from frontend.frame import follow, show
from frontend.queries import uuid_of


def _context(access: Access) -> dict[str, Any]:
    project = access.project
    return {
        "problems": problems_of(project),
        "going": going_runs(project),
        "recent": runs_page(project, RunFilter(), size=5).rows,
        "clusters": clusters_view(project),
        "events": events_page(project, EventFilter(quiet=True), size=12).events,
        "ingredients": run_ingredients(project),
    }


@require_safe
@page()
def home(request: HttpRequest, access: Access) -> HttpResponse:
    """The first page."""
    live = follow(access, *going_topics(access.project), *lane_topics(access.project))
    return show(request, access, "frontend/home.html", _context(access), section="home", live=live)


@require_safe
@page()
def home_part(request: HttpRequest, access: Access) -> HttpResponse:
    """The first page's moving part alone."""
    return render(request, "frontend/home_part.html", {"access": access, **_context(access)})


@require_POST
@page()
def project_switch(request: HttpRequest, access: Access) -> HttpResponse:
    """Choose the project that lists show."""
    chosen = access_of(request, uuid_of(request.POST, "project"))
    request.session[SESSION_KEY] = str(chosen.project.pk)
    return redirect("home")
