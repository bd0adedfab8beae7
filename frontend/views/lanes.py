"""Lanes: where their cadence stands, what their window holds, what is on its way, what served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import Lane, Run
from controlplane.permissions import Action
from controlplane.selectors.pages_alerts import lane_alerts, lane_topics
from controlplane.selectors.pages_cadence import cadence_view, readiness_of, slot_history
from controlplane.selectors.pages_events import topic_tail
from controlplane.selectors.pages_feedback import sender_names
from controlplane.selectors.pages_lanes import lane_releases, lane_rows, shipping_of
from controlplane.selectors.pages_pipeline import pipeline_of
from controlplane.selectors.pages_releases import release_view, version_line
from controlplane.selectors.pages_watch import watch_view
from controlplane.services import releases as services
from controlplane.services.events import lane_topic
from controlplane.services.windows import lane_train
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import follow, show
from frontend.outcomes import Problems, refusals
from frontend.queries import whole_of


@require_safe
@page()
def lane_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All lanes."""
    live = follow(access, *lane_topics(access.project))
    context = {"rows": lane_rows(access.project)}
    return show(
        request, access, "frontend/lanes.html", context, section="lanes", live=live, part="frontend/lanes_part.html"
    )


def lane_of(request: HttpRequest, lane_id: UUID) -> tuple[Access, Lane]:
    """A lane and the user's access to its project. Raises: Http404."""
    lanes = Lane.objects.select_related("project", "cluster", "model", "promoted_version", "rollback_to")
    lane = lanes.filter(pk=lane_id).first()
    if lane is None:
        raise Http404("there is no such lane")
    return access_of(request, lane.project_id), lane


def _status(lane: Lane) -> dict[str, Any]:
    view = cadence_view(lane)
    pipeline = pipeline_of(lane, view.spec, view.history.slots, lane_releases(lane))
    return {"view": view, "pipeline": pipeline, "alerts": lane_alerts(lane)}


def _release(lane: Lane) -> dict[str, Any]:
    flying = shipping_of(lane, lane_releases(lane)).flying
    return {"flight": release_view(flying) if flying else None}


def _readiness(lane: Lane) -> dict[str, Any]:
    ready = readiness_of(lane)
    return {"ready": ready, "names": sender_names(lane.project, [sender for sender, _ in ready.mix])}


def _watch(lane: Lane) -> dict[str, Any]:
    return {"watch": watch_view(lane)}


def _slots(lane: Lane) -> dict[str, Any]:
    return {"history": slot_history(lane)}


def _line(lane: Lane) -> dict[str, Any]:
    return {"line": version_line(lane)}


def _shipping(lane: Lane) -> dict[str, Any]:
    return {"shipping": shipping_of(lane, lane_releases(lane))}


def _events(lane: Lane) -> dict[str, Any]:
    return {"events": topic_tail(lane_topic(lane.pk))}


# What moves on the page, each part by itself: a part's template is `lane_<part>.html`.
PARTS: dict[str, Callable[[Lane], dict[str, Any]]] = {
    "status": _status,
    "release": _release,
    "readiness": _readiness,
    "watch": _watch,
    "slots": _slots,
    "line": _line,
    "shipping": _shipping,
    "events": _events,
}
# Parts that read many rows: the page comes without them, and asks for them once it is there.
LAZY = ("readiness", "watch")


@require_safe
@page()
def lane_detail(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """One lane. With `?whole`, for browsers without scripts, nothing is left for later."""
    access, lane = lane_of(request, lane_id)
    live = follow(access, lane_topic(lane.pk))
    whole = "whole" in request.GET
    context: dict[str, Any] = {"lane": lane, "whole": whole}
    for name, part in PARTS.items():
        if whole or name not in LAZY:
            context |= part(lane)
    return show(request, access, "frontend/lane.html", context, section="lanes", live=live)


@require_safe
@page()
def lane_part(request: HttpRequest, _access: Access, lane_id: UUID, part: str) -> HttpResponse:
    """One moving part of the lane's page."""
    access, lane = lane_of(request, lane_id)
    if part not in PARTS:
        raise Http404("the page has no such part")
    context = {"access": access, "lane": lane, **PARTS[part](lane)}
    return render(request, f"frontend/lane_{part}.html", context)


@require_http_methods(["GET", "POST"])
@page()
def lane_train_view(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """Train the promoted version on the present window."""
    access, lane = lane_of(request, lane_id)
    require(access, Action.RUNS_CONTROL)
    problems = Problems()
    if request.method == "POST":
        minimum = whole_of(request.POST, "minimum_answers")
        name = request.POST.get("name", "").replace("\x00", "").strip()
        overrides = {} if minimum is None else {"minimum_answers": minimum}
        with refusals(problems, {"name": "name", "spec": "minimum_answers"}):
            run = lane_train(lane=lane, name=name, actor=access.actor, user=access.user, overrides=overrides)
            messages.success(request, f"{run.name} trains on the window of {lane.slug}")
            return redirect("run", run.pk)
    context = {"lane": lane, "ready": readiness_of(lane), "problems": problems, "values": request.POST}
    return show(request, access, "frontend/lane_train.html", context, section="lanes", status=422 if problems else 200)


@require_http_methods(["GET", "POST"])
@page()
def release_propose(request: HttpRequest, _access: Access, lane_id: UUID, run_id: UUID) -> HttpResponse:
    """Propose the version that a run made."""
    access, lane = lane_of(request, lane_id)
    require(access, Action.RELEASES_PROPOSE)
    run = Run.objects.filter(pk=run_id, project=lane.project).select_related("lineage__head__lineage").first()
    if run is None or run.lineage.head is None:
        raise Http404("there is no such run, or it has no version")
    version = run.lineage.head

    def perform(reason: str, _: int | None) -> None:
        services.release_propose(
            lane=lane, version=version, run=run, proposer=access.user, actor=access.actor, reason=reason
        )

    act = Act(
        title=f"Propose {run.name} for {lane.slug}",
        explains=(
            "The version is loaded beside the one that answers users, and both are tried on the same held-out tasks. "
            "Users meet it only as the lane's cadence says, or once somebody else approves and promotes it."
        ),
        label="Propose",
        back=reverse("lane", args=[lane.pk]),
        section="lanes",
        perform=perform,
        done=f"{run.name} is proposed for {lane.slug}; its gate runs now",
    )
    return ask(request, access, act)
