"""Clusters: what each replica holds, how far it lags, what is on its way, what is lent, and what capacity would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.models import Project, Replica
from controlplane.selectors.pages_capacity import capacity_view
from controlplane.selectors.pages_chain import chains_view
from controlplane.selectors.pages_fleet import clusters_view, regions_of, totals_of
from controlplane.selectors.pages_lending import lending_view
from controlplane.selectors.pages_replica import events_of_replica
from controlplane.selectors.pages_transfers import transfers_view
from frontend.access import Access, access_of, page
from frontend.frame import follow, show


def _regions(project: Project) -> dict[str, Any]:
    views = clusters_view(project)
    return {"regions": regions_of(views), "totals": totals_of(views)}


PARTS: dict[str, Callable[[Project], dict[str, Any]]] = {
    "regions": _regions,
    "transfers": lambda project: {"transfers": transfers_view(project)},
    "chains": lambda project: {"chains": chains_view(project)},
    "lending": lambda project: {"lending": lending_view(project)},
    "planner": lambda project: {"capacity": capacity_view(project)},
}
_REPLICA_TEMPLATE = "frontend/replica_part.html"
_LATER = "planner"  # it reads the most, and nobody waits for it


@require_safe
@page()
def clusters(request: HttpRequest, access: Access) -> HttpResponse:
    """All clusters."""
    live = follow(access)
    context: dict[str, Any] = {}
    for part, read in PARTS.items():
        context |= {} if part == _LATER else read(access.project)
    return show(request, access, "frontend/clusters.html", context, section="clusters", live=live)


@require_safe
@page()
def replica_detail(request: HttpRequest, _access: Access, replica_id: UUID) -> HttpResponse:
    """One replica: what it holds, its transfers, and what happened to it."""
    replica = Replica.objects.select_related("cluster").filter(pk=replica_id).first()
    if replica is None:
        raise Http404("there is no such replica")
    access = access_of(request, replica.cluster.project_id)
    live = follow(access)
    view = next(view for view in clusters_view(access.project) if view.cluster.pk == replica.cluster_id)
    alone = dataclasses.replace(view, replicas=[one for one in view.replicas if one.replica.pk == replica.pk])
    context = {
        "replica": replica,
        "view": alone,
        "transfers": transfers_view(access.project, replica=replica),
        "events": events_of_replica(replica),
    }
    return show(
        request, access, "frontend/replica.html", context, section="clusters", live=live, part=_REPLICA_TEMPLATE
    )


@require_safe
@page()
def clusters_part(request: HttpRequest, access: Access, part: str) -> HttpResponse:
    """One moving part of the clusters page."""
    if part not in PARTS:
        raise Http404("there is no such part")
    return render(request, f"frontend/clusters_{part}.html", {"access": access, **PARTS[part](access.project)})
