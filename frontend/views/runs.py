"""Runs: the list, one run, two runs side by side."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.models import Run
from controlplane.selectors.lost_groups import lost_groups
from controlplane.selectors.pages_events import topic_tail
from controlplane.selectors.pages_runs import (
    RunFilter,
    forks_of,
    going_topics,
    parent_run_of,
    rubric_hashes,
    run_counts,
    run_ingredients,
    run_rows,
    run_steps,
    run_versions,
    runs_page,
    spec_difference,
    steps_planned,
)
from controlplane.selectors.pages_series import CHARTS, run_series
from controlplane.selectors.pages_timeline import run_timeline
from controlplane.selectors.pages_work import dead_letters
from controlplane.services.events import run_topic
from controlplane.services.transitions import sources_of
from controlplane.states import RunState
from frontend.access import Access, access_of, page
from frontend.frame import follow, show
from frontend.queries import choice_of, text_of, uuid_of
from frontend.views.assets import plotly_url

PARTS = ("status", "steps", "events", "timeline")
CONTROLS = "controls"


@require_safe
@page()
def run_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All runs, filtered by what the URL says: the URL is the saved view."""
    live = follow(access, *going_topics(access.project))
    wanted = RunFilter(
        text=text_of(request.GET, "text"),
        state=choice_of(request.GET, "state", RunState.values),
        model=text_of(request.GET, "model"),
        before=uuid_of(request.GET, "before"),
    )
    context = {
        "page": runs_page(access.project, wanted),
        "wanted": wanted,
        "states": RunState.values,
        "ingredients": run_ingredients(access.project),
        "filtered": any((wanted.text, wanted.state, wanted.model, wanted.before)),
    }
    return show(
        request, access, "frontend/runs.html", context, section="runs", live=live, part="frontend/runs_part.html"
    )


def run_of(request: HttpRequest, run_id: UUID) -> tuple[Access, Run]:
    """A run and the user's access to its project. Raises: Http404."""
    run = Run.objects.select_related("project", "lineage__model", "lineage__parent", "lineage__head", "created_by")
    found = run.filter(pk=run_id).first()
    if found is None:
        raise Http404("there is no such run")
    return access_of(request, found.project_id), found


def verbs_of(run: Run) -> dict[str, bool]:
    """Which controls the run's state allows."""
    targets = {"pause": RunState.PAUSED, "resume": RunState.RUNNING, "stop": RunState.STOPPED}
    can = {verb: run.state in sources_of(target) for verb, target in targets.items()}
    can["resume"] = can["resume"] and run.state != RunState.PENDING
    return can


def _status(run: Run) -> dict[str, Any]:
    row = run_rows([run])[0]
    return {"row": row, "counts": run_counts(run), "letters": dead_letters(run), "lost": lost_groups(run)}


def _part_context(run: Run, part: str) -> dict[str, Any]:
    if part == "status":
        return _status(run)
    if part == "steps":
        return {"steps": run_steps(run), "versions": run_versions(run)}
    if part == "timeline":
        return {"timeline": run_timeline(run)}
    return {"events": topic_tail(run_topic(run.pk))}


@require_safe
@page()
def run_detail(request: HttpRequest, _access: Access, run_id: UUID) -> HttpResponse:
    """One run: charts, progress, controls, steps, events."""
    access, run = run_of(request, run_id)
    live = follow(access, run_topic(run.pk))
    context: dict[str, Any] = {
        "run": run,
        "verbs": verbs_of(run),
        "planned": steps_planned(run),
        "charts": CHARTS,
        "plotly": plotly_url(),
        "parent": parent_run_of(run),
        "forks": forks_of(run),
        "stages": run.stages.select_related("task_set", "rubric_version__rubric").order_by("position"),
    }
    for part in PARTS:
        context |= _part_context(run, part)
    return show(request, access, "frontend/run.html", context, section="runs", live=live)


@require_safe
@page()
def run_part(request: HttpRequest, _access: Access, run_id: UUID, part: str) -> HttpResponse:
    """One moving part of the run page."""
    access, run = run_of(request, run_id)
    if part not in (*PARTS, CONTROLS):
        raise Http404("there is no such part")
    moving = {} if part == CONTROLS else _part_context(run, part)
    context = {"access": access, "run": run, "verbs": verbs_of(run), **moving}
    return render(request, f"frontend/run_{part}.html", context)


@require_safe
@page()
def run_series_json(request: HttpRequest, _access: Access, run_id: UUID) -> JsonResponse:
    """The run's charts as data."""
    _, run = run_of(request, run_id)
    return JsonResponse({"run": str(run.pk), "charts": run_series(run)})


@require_safe
@page()
def run_compare(request: HttpRequest, _access: Access) -> HttpResponse:
    """Two runs side by side: what differs in their specs, and whether their rewards compare at all."""
    first, second = uuid_of(request.GET, "a"), uuid_of(request.GET, "b")
    if first is None or second is None:
        raise Http404("name two runs: ?a=…&b=…")
    access, a = run_of(request, first)
    other, b = run_of(request, second)
    if other.project.pk != access.project.pk:
        raise Http404("the runs belong to different projects")
    rows = run_rows([a, b])
    differences = spec_difference(a.spec, b.spec)
    context = {
        "a": rows[0],
        "b": rows[1],
        "pair": rows,
        "differences": differences,
        "changed": sum(difference.kind != "same" for difference in differences),
        "comparable": rubric_hashes(a) == rubric_hashes(b),
    }
    return show(request, access, "frontend/run_compare.html", context, section="runs")
