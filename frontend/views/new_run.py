"""A new run: the form, or the spec as JSON."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Run
from controlplane.permissions import Action
from controlplane.selectors.environments import environments_of
from controlplane.selectors.pages_runs import RunIngredients, run_ingredients
from controlplane.services.runs import run_create
from frontend.access import Access, page
from frontend.forms.run import CHOICES, NUMBERS, RunForm, spec_fields, suggested
from frontend.frame import show
from frontend.plain import without_hidden
from frontend.queries import uuid_of


@require_http_methods(["GET", "POST"])
@page(Action.RUNS_CONTROL)
def run_new(request: HttpRequest, access: Access) -> HttpResponse:
    """Show the form, check it, or start the run."""
    ingredients = run_ingredients(access.project)
    hints = suggested(ingredients, environments_of(access.project.pk))
    form = _fresh(request, access, ingredients, hints) if request.method == "GET" else RunForm.of_post(request.POST)
    if request.method == "POST":
        run = _create(access, form, ingredients)
        if run is not None:
            messages.success(request, f"{run.name} is created; the conductor starts it")
            return redirect("run", run.pk)
    context = {
        "form": form,
        "numbers": NUMBERS,
        "ingredients": ingredients,
        "choices": CHOICES,
        "suggested": hints,
        "spec_fields": spec_fields(),
    }
    status = 422 if form.problems else 200
    return show(request, access, "frontend/run_new.html", context, section="runs", status=status)


def _fresh(
    request: HttpRequest, access: Access, ingredients: RunIngredients, hints: dict[str, dict[str, str]]
) -> RunForm:
    wanted = uuid_of(request.GET, "like")
    like = Run.objects.filter(project=access.project, pk=wanted).first() if wanted else None
    if like is None:
        return RunForm.fresh(ingredients, hints)
    return RunForm.like(like.spec, f"{without_hidden(like.name)} again")


def _create(access: Access, form: RunForm, ingredients: RunIngredients) -> Run | None:
    spec = form.spec(ingredients)
    if not form.as_json:
        form.spec_text = form.resolved(spec)
    if form.problems:
        return None
    try:
        return run_create(
            project=access.project, name=form.values["name"], spec=spec, actor=access.actor, user=access.user
        )
    except ControlPlaneError as error:
        form.refuse(error.message, error.field)
        return None
