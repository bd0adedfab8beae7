"""The map from signals to reward: edited, tried on the last day's answers, published; and the signals it speaks of."""

from __future__ import annotations

from typing import Any

import msgspec
from django.contrib import messages
from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.models import SignalMap
from controlplane.permissions import Action
from controlplane.selectors.pages_signal_map import map_preview, map_versions, signals_of
from controlplane.services.product_events import detected_signals_define
from controlplane.services.signals import SignalMapContent, signal_define, signal_map_publish
from controlplane.states import SignalType
from frontend.access import Access, page
from frontend.forms.signal_map import SignalMapForm, content_hash
from frontend.frame import show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of, number_of, text_of, whole_of


@require_http_methods(["GET", "POST"])
@page(Action.RUBRICS_PUBLISH)
def signal_map(request: HttpRequest, access: Access) -> HttpResponse:
    """The editor. What is published is what was previewed: a map that changed since is shown first."""
    signals, versions = signals_of(access.project), map_versions(access.project)
    present = _content(versions[0]) if versions else None
    context: dict[str, Any] = {"signals": signals, "versions": versions, "types": SignalType.values, "values": {}}
    status = 200
    if request.method == "POST":
        form = SignalMapForm.of_post(request.POST, signals)
        content = form.content()
        if content is not None:
            digest = content_hash(content)
            if request.POST.get("act") == "publish" and request.POST.get("previewed") == digest:
                with refusals(form.problems):
                    return _publish(request, access, content, versions)
            elif request.POST.get("act") == "publish":
                messages.warning(request, "The map changed since the preview: look at what it does now, then publish")
            context |= {"preview": map_preview(access.project, before=present, after=content), "previewed": digest}
            context["unchanged"] = bool(versions) and versions[0].content_hash == digest
        status = 200 if content is not None and not form.problems else 422
    else:
        number = whole_of(request.GET, "version")
        chosen = next((row for row in versions if row.number == number), versions[0] if versions else None)
        form = SignalMapForm.of_content(_content(chosen) if chosen else None, signals)
        context["shown"] = chosen
    return show(
        request, access, "frontend/signal_map.html", {**context, "form": form}, section="feedback", status=status
    )


def _content(row: SignalMap) -> SignalMapContent:
    return msgspec.convert(row.content, type=SignalMapContent)


def _publish(
    request: HttpRequest, access: Access, content: SignalMapContent, versions: list[SignalMap]
) -> HttpResponse:
    published = signal_map_publish(
        project=access.project, content=msgspec.to_builtins(content), author=access.user, actor=access.actor
    )
    known = versions and published.number <= versions[0].number
    messages.success(
        request, f"Signal map {published.number} {'has this content already' if known else 'is published'}"
    )
    return redirect("signal_map")


@require_POST
@page(Action.RUBRICS_PUBLISH)
def signal_add(request: HttpRequest, access: Access) -> HttpResponse:
    """Define a signal, or all that product events are read as."""
    problems = Problems()
    if request.POST.get("act") == "detected":
        with refusals(problems):
            rows = detected_signals_define(project=access.project)
            messages.success(request, f"Defined: {', '.join(sorted(row.slug for row in rows))}")
    else:
        _define(request, access, problems)
    if not problems:
        return redirect("signal_map")
    signals, versions = signals_of(access.project), map_versions(access.project)
    context = {
        "signals": signals,
        "versions": versions,
        "types": SignalType.values,
        "form": SignalMapForm.of_content(_content(versions[0]) if versions else None, signals),
        "shown": versions[0] if versions else None,
        "signal_problems": problems,
        "values": request.POST,
    }
    return show(request, access, "frontend/signal_map.html", context, section="feedback", status=422)


def _define(request: HttpRequest, access: Access, problems: Problems) -> None:
    slug = text_of(request.POST, "slug")
    if not slug or not slug.replace("_", "").replace("-", "").isalnum() or not slug.isascii() or len(slug) > 64:
        problems.add("Give a name of letters, digits, - and _", "slug")
        return
    names = [name.strip()[:64] for name in request.POST.get("categories", "").replace("\x00", "")[:4000].split(",")]
    try:
        with refusals(problems, {"minimum": "minimum", "categories": "categories"}), transaction.atomic():
            signal_define(
                project=access.project,
                slug=slug,
                value_type=SignalType(choice_of(request.POST, "value_type", SignalType.values, "boolean")),
                minimum=number_of(request.POST, "minimum"),
                maximum=number_of(request.POST, "maximum"),
                categories=[name for name in names if name],
            )
            messages.success(request, f"Signal {slug} is defined")
    except IntegrityError:
        problems.add("There is a signal of this name already", "slug")
