"""The feedback page: what comes in, how it joins, what was refused, and how signals become reward."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import RejectedPayload
from controlplane.permissions import Action
from controlplane.selectors.pages_lanes import feedback_view
from controlplane.services.events import lane_topic
from controlplane.services.rejections import payload_replay
from controlplane.states import FeedbackState
from frontend.access import Access, access_of, page
from frontend.frame import follow, show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of, text_of
from frontend.views.control import require


@require_safe
@page()
def feedback(request: HttpRequest, access: Access) -> HttpResponse:
    """What users say of what lanes answered."""
    state = choice_of(request.GET, "state", FeedbackState.values)
    view = feedback_view(access.project, state=state, signal=text_of(request.GET, "signal"))
    live = follow(access, *([lane_topic(view.lane.pk)] if view.lane else []))
    context = {"view": view, "states": FeedbackState.values, "state": state}
    return show(request, access, "frontend/feedback.html", context, section="feedback", live=live)


@require_safe
@page()
def feedback_part(request: HttpRequest, access: Access) -> HttpResponse:
    """What moves on the page: without filters, the newest events of all kinds."""
    return render(request, "frontend/feedback_part.html", {"access": access, "view": feedback_view(access.project)})


@require_http_methods(["GET", "POST"])
@page()
def rejected_replay(request: HttpRequest, _access: Access, payload_id: UUID) -> HttpResponse:
    """Send a kept payload through the full validation again."""
    row = RejectedPayload.objects.select_related("project").filter(pk=payload_id).first()
    if row is None:
        raise Http404("there is no such payload")
    access = access_of(request, row.project_id)
    require(access, Action.WORK_REPLAY)
    problems = Problems()
    if request.method == "POST":
        try:
            with refusals(problems):
                receipt = payload_replay(row=row, actor=access.actor)
                messages.success(request, f"The payload was taken: {receipt.join}")
                return redirect("feedback")
        except Http404 as error:  # what the payload names is still not there: say so on this page
            problems.add(str(error))
    context = {"row": row, "problems": problems, "back": reverse("feedback")}
    return show(request, access, "frontend/rejected.html", context, section="feedback", status=409 if problems else 200)
