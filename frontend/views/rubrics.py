"""Rubrics: read them, and publish a new immutable version."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import Rubric
from controlplane.permissions import Action
from controlplane.selectors.pages_catalog import (
    CRITERION_KINDS,
    TIERS,
    kinds_shown,
    rubric_versions_of,
    rubrics_of,
    weighted_criteria,
)
from controlplane.services.catalog import rubric_publish
from frontend.access import Access, page
from frontend.forms.rubric import RubricForm
from frontend.frame import show
from frontend.outcomes import refusals
from frontend.queries import whole_of


@require_safe
@page()
def rubric_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All rubrics."""
    return show(request, access, "frontend/rubrics.html", {"rubrics": rubrics_of(access.project)}, section="rubrics")


def _rubric(access: Access, slug: str) -> Rubric:
    rubric = Rubric.objects.filter(project=access.project, slug=slug).first()
    if rubric is None:
        raise Http404("there is no such rubric in this project")
    return rubric


@require_safe
@page()
def rubric_detail(request: HttpRequest, access: Access, slug: str) -> HttpResponse:
    """A rubric: the version asked for, else the newest, and the list of all."""
    versions = rubric_versions_of(_rubric(access, slug))
    number = whole_of(request.GET, "version")
    shown = next((version for version in versions if version.number == number), versions[0] if versions else None)
    context = {
        "slug": slug,
        "versions": versions,
        "shown": shown,
        "criteria": weighted_criteria(shown.criteria) if shown else [],
    }
    return show(request, access, "frontend/rubric.html", context, section="rubrics")


@require_http_methods(["GET", "POST"])
@page(Action.RUBRICS_PUBLISH)
def rubric_new(request: HttpRequest, access: Access) -> HttpResponse:
    """Publish the first version of a new rubric."""
    return _edit(request, access, RubricForm.of_post(request.POST) if request.method == "POST" else RubricForm.blank())


@require_http_methods(["GET", "POST"])
@page(Action.RUBRICS_PUBLISH)
def rubric_edit(request: HttpRequest, access: Access, slug: str) -> HttpResponse:
    """Publish the next version of a rubric, starting from the newest."""
    versions = rubric_versions_of(_rubric(access, slug))
    form = (
        RubricForm.of_post(request.POST, slug=slug)
        if request.method == "POST"
        else RubricForm.of_criteria(slug, versions[0].criteria if versions else [])
    )
    return _edit(request, access, form, based_on=versions[0].number if versions else None)


def _edit(request: HttpRequest, access: Access, form: RubricForm, based_on: int | None = None) -> HttpResponse:
    if request.method == "POST" and not form.problems:
        with refusals(form.problems, {"criteria": "criteria", "slug": "slug"}):
            version = rubric_publish(
                project=access.project,
                slug=form.slug,
                criteria=form.criteria(),
                author=access.user,
                note=form.note,
                actor=access.actor,
            )
            unchanged = based_on is not None and version.number <= based_on
            text = "has this content already" if unchanged else "is published"
            messages.success(request, f"{form.slug} version {version.number} {text}: {version.content_hash[:12]}")
            return redirect("rubric", form.slug)
    context: dict[str, Any] = {
        "form": form,
        "kinds": CRITERION_KINDS,
        "kinds_shown": kinds_shown(),
        "tiers": TIERS,
        "based_on": based_on,
    }
    status = 422 if form.problems else 200
    return show(request, access, "frontend/rubric_form.html", context, section="rubrics", status=status)
