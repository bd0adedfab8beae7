"""The feedback page: what comes in, how it joins, who sends it, what was refused."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db import IntegrityError, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import FeedbackSource, RejectedPayload
from controlplane.permissions import Action
from controlplane.selectors.pages_alerts import lane_topics
from controlplane.selectors.pages_feedback import feedback_view, sender_names, sources_view
from controlplane.services.rejections import payload_replay
from controlplane.services.sources import source_configure, source_create, source_rotate
from controlplane.states import FeedbackState
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import follow, show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of, number_of, text_of, whole_of

MAX_TRUST = 1000.0


@require_safe
@page()
def feedback(request: HttpRequest, access: Access) -> HttpResponse:
    """What users say of what lanes answered, filtered by what the URL says."""
    wanted = {
        "state": choice_of(request.GET, "state", FeedbackState.values),
        "signal": text_of(request.GET, "signal"),
        "sender": text_of(request.GET, "sender"),
    }
    live = follow(access, *lane_topics(access.project))
    context = {
        "view": feedback_view(access.project, **wanted),
        "states": FeedbackState.values,
        "wanted": wanted,
        "filtered": any(wanted.values()),
    }
    return show(
        request,
        access,
        "frontend/feedback.html",
        context,
        section="feedback",
        live=live,
        part="frontend/feedback_part.html",
    )


@require_http_methods(["GET", "POST"])
@page()
def rejected_replay(request: HttpRequest, _access: Access, payload_id: UUID) -> HttpResponse:
    """Send a kept payload through the full validation again."""
    row = RejectedPayload.objects.select_related("project").filter(pk=payload_id).first()
    if row is None:
        raise Http404("there is no such payload")
    access = access_of(request, row.project_id)
    problems = Problems()
    if request.method == "POST":
        require(access, Action.WORK_REPLAY)
        try:
            with refusals(problems):
                receipt = payload_replay(row=row, actor=access.actor)
                messages.success(request, f"The payload was taken: {receipt.join}")
                return redirect("feedback")
        except Http404 as error:  # what the payload names is still not there: say so on this page
            problems.add(str(error))
    names = sender_names(access.project, [row.sender])
    context = {"row": row, "sender": names[row.sender], "problems": problems, "back": reverse("feedback")}
    return show(request, access, "frontend/rejected.html", context, section="feedback", status=409 if problems else 200)


@never_cache
@require_http_methods(["GET", "POST"])
@page()
def sources(request: HttpRequest, access: Access) -> HttpResponse:
    """Who may send webhooks. A new secret is in the answer to the form that made it, and nowhere else."""
    problems = Problems()
    secret, made = "", None
    if request.method == "POST":
        require(access, Action.LANES_MANAGE)
        made, secret = _add(request, access, problems)
    context: dict[str, Any] = {
        "sources": sources_view(access.project),
        "secret": secret,
        "made": made,
        "problems": problems,
        "values": request.POST if problems else {},
    }
    return show(request, access, "frontend/sources.html", context, section="feedback", status=422 if problems else 200)


def _add(request: HttpRequest, access: Access, problems: Problems) -> tuple[FeedbackSource | None, str]:
    slug = text_of(request.POST, "slug")
    trust = number_of(request.POST, "trust_weight")
    if not slug or not slug.isascii() or not slug.replace("-", "").replace("_", "").isalnum() or len(slug) > 64:
        problems.add("Give a name of letters, digits, - and _", "slug")
    if trust is None or not 0 < trust <= MAX_TRUST:
        problems.add("Give a number over 0; 1 is as much as any other", "trust_weight")
    if problems:
        return None, ""
    try:
        with refusals(problems, {"slug": "slug"}), transaction.atomic():
            return source_create(project=access.project, slug=slug, actor=access.actor, trust_weight=trust or 1.0)
    except IntegrityError:
        problems.add("This name is taken: names of sources are in webhook addresses, shared by all projects", "slug")
    return None, ""


@require_http_methods(["GET", "POST"])
@page()
def source_switch(request: HttpRequest, _access: Access, source_id: UUID) -> HttpResponse:
    """Turn a source off, or on again."""
    source = FeedbackSource.objects.filter(pk=source_id).first()
    if source is None:
        raise Http404("there is no such source")
    access = access_of(request, source.project_id, Action.LANES_MANAGE)
    off = source.disabled_at is None
    act = Act(
        title=f"{'Disable' if off else 'Enable'} source {source.slug}",
        explains=(
            "Everything that it sends is answered with 410 and not stored. What it sent stays."
            if off
            else "What it sends is taken again, under the secrets that it had."
        ),
        label="Disable" if off else "Enable",
        back=reverse("sources"),
        section="feedback",
        perform=lambda reason, _: source_configure(source=source, actor=access.actor, reason=reason, disabled=off),
        done=f"{source.slug} is {'disabled' if off else 'enabled'}",
        dangerous=off,
    )
    return ask(request, access, act)


@never_cache
@require_http_methods(["GET", "POST"])
@page()
def source_change(request: HttpRequest, _access: Access, source_id: UUID) -> HttpResponse:
    """Change how much a source's word weighs and how fast it may send; make it a new secret, shown once."""
    source = FeedbackSource.objects.filter(pk=source_id).first()
    if source is None:
        raise Http404("there is no such source")
    access = access_of(request, source.project_id, Action.LANES_MANAGE)
    problems = Problems()
    values: dict[str, Any] = {
        "trust_weight": f"{source.trust_weight:g}",
        "rate_per_minute": source.rate_per_minute,
        "actor_rate_per_minute": source.actor_rate_per_minute,
        "reason": "",
    }
    if request.method == "POST" and request.POST.get("act") == "rotate":
        return _rotate(request, access, source, values)
    if request.method == "POST":
        values = {name: text_of(request.POST, name) for name in values}
        trust = number_of(request.POST, "trust_weight")
        rate, actor_rate = (whole_of(request.POST, name) for name in ("rate_per_minute", "actor_rate_per_minute"))
        if trust is None or not 0 < trust <= MAX_TRUST:
            problems.add("Give a number over 0; 1 is as much as any other", "trust_weight")
        for name, given in (("rate_per_minute", rate), ("actor_rate_per_minute", actor_rate)):
            if not given:
                problems.add("Give a whole number from 1", name)
        if not values["reason"]:
            problems.add("Say why: the reason is kept in the event log", "reason")
        if not problems:
            with refusals(problems):
                source_configure(
                    source=source,
                    actor=access.actor,
                    reason=values["reason"],
                    trust_weight=trust,
                    rate_per_minute=rate,
                    actor_rate_per_minute=actor_rate,
                )
                messages.success(request, f"{source.slug} is changed")
                return redirect("sources")
    context = {"source": source, "values": values, "problems": problems}
    return show(request, access, "frontend/source.html", context, section="feedback", status=422 if problems else 200)


def _rotate(request: HttpRequest, access: Access, source: FeedbackSource, values: dict[str, Any]) -> HttpResponse:
    problems, secret = Problems(), ""
    reason = text_of(request.POST, "reason")
    if reason:
        with refusals(problems):
            secret = source_rotate(source=source, actor=access.actor, reason=reason)
            source.refresh_from_db()
    else:
        problems.add("Say why: the reason is kept in the event log", "rotate")
    context = {"source": source, "values": values, "problems": problems, "secret": secret, "made": source}
    return show(request, access, "frontend/source.html", context, section="feedback", status=422 if problems else 200)
