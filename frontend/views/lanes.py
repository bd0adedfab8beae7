"""Lanes: what they serve, what their window holds, and releases on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import Lane, Release, Run
from controlplane.permissions import Action
from controlplane.selectors.pages_events import topic_tail
from controlplane.selectors.pages_lanes import lane_rows, lane_view
from controlplane.services import promotions
from controlplane.services import releases as services
from controlplane.services.events import lane_topic
from controlplane.services.windows import lane_train
from frontend.access import Access, access_of, page
from frontend.frame import follow, show
from frontend.outcomes import Problems, refusals
from frontend.queries import whole_of
from frontend.views.control import reason_of, require


@require_safe
@page()
def lane_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All lanes."""
    return show(request, access, "frontend/lanes.html", {"rows": lane_rows(access.project)}, section="lanes")


def lane_of(request: HttpRequest, lane_id: UUID) -> tuple[Access, Lane]:
    """A lane and the user's access to its project. Raises: Http404."""
    lanes = Lane.objects.select_related("project", "cluster", "model", "promoted_version")
    lane = lanes.filter(pk=lane_id).first()
    if lane is None:
        raise Http404("there is no such lane")
    return access_of(request, lane.project_id), lane


def _context(lane: Lane) -> dict[str, Any]:
    return {"view": lane_view(lane), "lane": lane, "events": topic_tail(lane_topic(lane.pk))}


@require_safe
@page()
def lane_detail(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """One lane."""
    access, lane = lane_of(request, lane_id)
    live = follow(access, lane_topic(lane.pk))
    return show(request, access, "frontend/lane.html", _context(lane), section="lanes", live=live)


@require_safe
@page()
def lane_part(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """What moves on the lane's page."""
    access, lane = lane_of(request, lane_id)
    return render(request, "frontend/lane_part.html", {"access": access, **_context(lane)})


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
    context = {"lane": lane, "view": lane_view(lane), "problems": problems, "values": request.POST}
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
    problems = Problems()
    if request.method == "POST":
        reason = reason_of(request, problems)
        if not problems:
            with refusals(problems):
                services.release_propose(
                    lane=lane,
                    version=run.lineage.head,
                    run=run,
                    proposer=access.user,
                    actor=access.actor,
                    reason=reason,
                )
                messages.success(request, f"{run.name} is proposed for {lane.slug}; its gate runs now")
                return redirect("lane", lane.pk)
    context = {
        "title": f"Propose {run.name} for {lane.slug}",
        "explains": (
            "The version is loaded beside the one that answers users, and both are tried on the same held-out tasks. "
            "No user sees it until somebody else approves and promotes it."
        ),
        "label": "Propose",
        "back": reverse("lane", args=[lane.pk]),
        "problems": problems,
        "reason": request.POST.get("reason", ""),
    }
    return show(request, access, "frontend/reason.html", context, section="lanes", status=409 if problems else 200)


@dataclass(frozen=True, slots=True)
class Verb:
    """One act on a release."""

    label: str
    done: str
    explains: str
    action: Action
    act: Callable[[Release, Access, str], object]
    dangerous: bool = False


VERBS: dict[str, Verb] = {
    "approve": Verb(
        "Approve",
        "has your approval",
        "Your word that this version may answer users. A proposer cannot approve their own release.",
        Action.RELEASES_APPROVE,
        lambda release, access, reason: services.release_approve(
            release=release, user=access.user, actor=access.actor, reason=reason
        ),
    ),
    "promote": Verb(
        "Promote",
        "answers all users of the lane now",
        "All new requests of the lane go to this version at once. The incumbent stays loaded for a rollback.",
        Action.RELEASES_APPROVE,
        lambda release, access, reason: promotions.release_promote(release=release, actor=access.actor, reason=reason),
    ),
    "abort": Verb(
        "Abort",
        "is ended",
        "The release ends here; users notice nothing. The next one can be proposed.",
        Action.RELEASES_ABORT,
        lambda release, access, reason: services.release_end(release=release, actor=access.actor, reason=reason),
        dangerous=True,
    ),
    "rollback": Verb(
        "Roll back",
        "is rolled back",
        "New requests go to the version before, at once. Feedback on this version is quarantined: nothing is trained "
        "on it, and its descendants are marked.",
        Action.RELEASES_ABORT,
        lambda release, access, reason: promotions.release_rollback(release=release, actor=access.actor, reason=reason),
        dangerous=True,
    ),
}


@require_http_methods(["GET", "POST"])
@page()
def release_control(request: HttpRequest, _access: Access, release_id: UUID, verb: str) -> HttpResponse:
    """Approve, promote, abort or roll back a release."""
    release = Release.objects.select_related("lane", "version", "incumbent").filter(pk=release_id).first()
    if release is None or verb not in VERBS:
        raise Http404("there is no such release, or nothing like that can be done with it")
    access = access_of(request, release.lane.project_id)
    chosen = VERBS[verb]
    require(access, chosen.action)
    problems = Problems()
    if request.method == "POST":
        reason = reason_of(request, problems)
        if not problems:
            with refusals(problems):
                chosen.act(release, access, reason)
                messages.success(request, f"Version {release.version.number} {chosen.done}")
                return redirect("lane", release.lane_id)
    context = {
        "title": f"{chosen.label}: version {release.version.epoch}-{release.version.number} on {release.lane.slug}",
        "explains": chosen.explains,
        "label": chosen.label,
        "dangerous": chosen.dangerous,
        "back": reverse("lane", args=[release.lane_id]),
        "problems": problems,
        "reason": request.POST.get("reason", ""),
    }
    return show(request, access, "frontend/reason.html", context, section="lanes", status=409 if problems else 200)
