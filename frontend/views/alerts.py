"""Alerts: what people are called for, what they found, and where alerts are sent."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import Alert, AlertHook
from controlplane.permissions import Action
from controlplane.selectors.pages_alerts import alerts_open, alerts_view, lane_topics
from controlplane.selectors.pages_blast import Blast
from controlplane.services.alerts import alert_resolve
from controlplane.services.hooks import hook_create, hook_disable
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import follow, show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of

MAX_URL_CHARS = 500


@never_cache
@require_http_methods(["GET", "POST"])
@page()
def alerts(request: HttpRequest, access: Access) -> HttpResponse:
    """Alerts and hooks. A new hook's secret is in the answer to the form that made it, and nowhere else."""
    problems = Problems()
    secret, made = "", None
    url = request.POST.get("url", "").replace("\x00", "").strip()[:MAX_URL_CHARS]
    if request.method == "POST":
        require(access, Action.LANES_MANAGE)
        with refusals(problems, {"url": "url"}):
            made, secret = hook_create(project=access.project, url=url, actor=access.actor)
    live = follow(access, *lane_topics(access.project))
    context = {
        "view": alerts_view(access.project),
        "secret": secret,
        "made": made,
        "problems": problems,
        "url": url if problems else "",
    }
    return show(
        request,
        access,
        "frontend/alerts.html",
        context,
        section="alerts",
        live=live,
        part="frontend/alerts_part.html",
        status=422 if problems else 200,
    )


@require_safe
@page()
def alerts_badge(request: HttpRequest, access: Access) -> HttpResponse:
    """How many are open, for the navigation."""
    return render(request, "frontend/alerts_badge.html", {"alerts_open": alerts_open(access.project)})


@require_http_methods(["GET", "POST"])
@page()
def alert_resolve_view(request: HttpRequest, _access: Access, alert_id: UUID) -> HttpResponse:
    """Say what was found; the lane goes on unless another alert holds it."""
    alert = Alert.objects.select_related("lane").filter(pk=alert_id).first()
    if alert is None:
        raise Http404("there is no such alert")
    access = access_of(request, alert.project_id, Action.RELEASES_APPROVE)
    from_lane = choice_of(request.GET, "from", ["lane"]) and alert.lane_id
    about = str(alert.detail.get("about", alert.subject))
    held = f"Lane {alert.lane.slug} is held by it" if alert.lane and alert.holds else ""
    act = Act(
        title=f"Resolve: {about}",
        explains="Say what you found. The alert closes, and its kind is not raised again for the same version.",
        label="Resolve",
        back=reverse("lane", args=[alert.lane_id]) if from_lane else reverse("alerts"),
        section="alerts",
        perform=lambda reason, _: alert_resolve(alert=alert, user=access.user, actor=access.actor, reason=reason),
        done="The alert is resolved",
        blast=Blast(note=f"{held}; its cadence goes on unless another alert holds it." if held else ""),
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page()
def hook_disable_view(request: HttpRequest, _access: Access, hook_id: UUID) -> HttpResponse:
    """Send nothing to a hook any more."""
    hook = AlertHook.objects.filter(pk=hook_id).first()
    if hook is None:
        raise Http404("there is no such hook")
    access = access_of(request, hook.project_id, Action.LANES_MANAGE)
    act = Act(
        title="Disable a hook",
        explains="Nothing is sent there any more, and what still waits is not sent. Add it anew to send again.",
        label="Disable",
        back=reverse("alerts"),
        section="alerts",
        perform=lambda reason, _: hook_disable(hook=hook, actor=access.actor, reason=reason),
        done="The hook is disabled",
        dangerous=True,
        blast=Blast(note=hook.shown),
    )
    return ask(request, access, act)
