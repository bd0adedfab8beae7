"""Clusters: what each replica holds, how far it lags, what was sent to it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.selectors.pages_fleet import clusters_view, transfers_of
from frontend.access import Access, page
from frontend.frame import follow, show


def _context(access: Access) -> dict[str, Any]:
    return {"clusters": clusters_view(access.project), "transfers": transfers_of(access.project)}


@require_safe
@page()
def clusters(request: HttpRequest, access: Access) -> HttpResponse:
    """All clusters."""
    live = follow(access)
    return show(request, access, "frontend/clusters.html", _context(access), section="clusters", live=live)


@require_safe
@page()
def clusters_part(request: HttpRequest, access: Access) -> HttpResponse:
    """The moving part of the clusters page."""
    return render(request, "frontend/clusters_part.html", {"access": access, **_context(access)})
