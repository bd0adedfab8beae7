"""A lane's cadence as people steer it: acts, its settings, and what served at a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from controlplane.models import PolicyVersion
from controlplane.permissions import Action
from controlplane.selectors.pages_blast import blast_of_cadence, blast_of_rollback
from controlplane.selectors.pages_cadence import settings_choices
from controlplane.selectors.pages_releases import version_line
from controlplane.services import cadence, promotions, slots
from controlplane.services.lanes import lane_served_at
from frontend.access import Access, page
from frontend.acts import Act, ask, reason_of, require
from frontend.forms.cadence import CadenceForm
from frontend.frame import show
from frontend.looks import version_name
from frontend.outcomes import Problems, refusals
from frontend.queries import whole_of
from frontend.views.lanes import lane_of

MAX_USER = 200


@dataclass(frozen=True, slots=True)
class Verb:
    """One act on a cadence."""

    label: str
    done: str
    explains: str
    perform: Callable[..., object]
    dangerous: bool = False


VERBS: dict[str, Verb] = {
    "pause": Verb(
        "Pause",
        "opens no slot until it is resumed",
        "No slot opens until somebody resumes the cadence. What trains or is being released goes on.",
        cadence.cadence_pause,
    ),
    "resume": Verb("Resume", "opens slots again", "Slots open again on the cadence's beat.", cadence.cadence_resume),
    "run": Verb(
        "Run now",
        "has a slot under way",
        "A slot opens at once. The beat of the others is kept; a pause of the cadence is not ended.",
        slots.slot_run_now,
    ),
    "skip": Verb(
        "Skip slot",
        "skips the slot",
        "The slot under way ends without a decision, its run and its release with it; or the next one is given up.",
        slots.slot_skip,
        dangerous=True,
    ),
}


@require_http_methods(["GET", "POST"])
@page()
def lane_act(request: HttpRequest, _access: Access, lane_id: UUID, verb: str) -> HttpResponse:
    """Pause, resume, run a slot now, skip one."""
    access, lane = lane_of(request, lane_id)
    require(access, Action.RELEASES_PROPOSE)
    chosen = VERBS.get(verb)
    if chosen is None:
        raise Http404("a cadence is paused or resumed, a slot is run or skipped")
    act = Act(
        title=f"{chosen.label}: {lane.slug}",
        explains=chosen.explains,
        label=chosen.label,
        back=reverse("lane", args=[lane.pk]),
        section="lanes",
        perform=lambda reason, revision: chosen.perform(
            lane=lane, actor=access.actor, reason=reason, expected_revision=revision
        ),
        done=f"{lane.slug} {chosen.done}",
        dangerous=chosen.dangerous,
        blast=blast_of_cadence(lane, verb),
        revision=lane.revision,
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page()
def lane_rollback(request: HttpRequest, _access: Access, lane_id: UUID, version_id: UUID) -> HttpResponse:
    """Let an earlier version answer again."""
    access, lane = lane_of(request, lane_id)
    require(access, Action.RELEASES_ABORT)
    version = PolicyVersion.objects.filter(pk=version_id, lineage__project=lane.project_id).first()
    if version is None:
        raise Http404("there is no such version")
    act = Act(
        title=f"Roll {lane.slug} back to version {version_name(version)}",
        explains=(
            "New requests go to that version, at once or as soon as a replica holds it. What answers now is "
            "quarantined with all that descends from it and the feedback on it; a release in flight ends."
        ),
        label="Roll back",
        back=reverse("lane", args=[lane.pk]),
        section="lanes",
        perform=lambda reason, revision: promotions.lane_rollback(
            lane=lane, version=version, actor=access.actor, reason=reason, expected_revision=revision
        ),
        done=f"{lane.slug} rolls back to version {version_name(version)}",
        dangerous=True,
        blast=blast_of_rollback(lane, version),
        revision=lane.revision,
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page()
def lane_cadence(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """The cadence's settings: fields, or the whole spec as JSON."""
    access, lane = lane_of(request, lane_id)
    require(access, Action.LANES_MANAGE)
    form = CadenceForm.of_post(request.POST) if request.method == "POST" else CadenceForm.of_spec(lane.cadence)
    reason = ""
    if request.method == "POST":
        spec = form.spec(lane.cadence)
        reason = reason_of(request, form.problems)
        if not form.problems:
            form.check(spec)
        if not form.problems:
            with refusals(form.problems, {"cadence": "spec", "reason": "reason"}):
                cadence.cadence_update(
                    lane=lane,
                    cadence=spec,
                    actor=access.actor,
                    reason=reason,
                    expected_revision=whole_of(request.POST, "revision"),
                )
                messages.success(request, f"The cadence of {lane.slug} is set" if spec else "The cadence is off")
                return redirect("lane", lane.pk)
    context: dict[str, Any] = {
        "lane": lane,
        "form": form,
        "reason": request.POST.get("reason", ""),
        "choices": settings_choices(lane.project),
    }
    status = 422 if form.problems else 200
    return show(request, access, "frontend/lane_cadence.html", context, section="lanes", status=status)


@require_http_methods(["GET", "POST"])
@page()
def lane_served(request: HttpRequest, _access: Access, lane_id: UUID) -> HttpResponse:
    """What answered everybody, or one user, at a moment. It is posted: a user's key belongs in no log of addresses."""
    access, lane = lane_of(request, lane_id)
    problems = Problems()
    asked: dict[str, Any] = {"at": timezone.now().strftime("%Y-%m-%dT%H:%M:%S"), "user": ""}
    if request.method == "POST":
        user = request.POST.get("user", "").replace("\x00", "")[:MAX_USER]
        asked = {"at": request.POST.get("at", "")[:40], "user": user}
        at = _moment(asked["at"])
        if at is None:
            problems.add("Give a moment, for example 2026-09-01T14:30, in UTC", "at")
        else:
            asked |= {"moment": at, "served": lane_served_at(lane=lane, at=at, user_key=user)}
    context = {"lane": lane, "asked": asked, "problems": problems, "line": version_line(lane)}
    return show(request, access, "frontend/lane_served.html", context, section="lanes", status=422 if problems else 200)


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
