"""Acts on runs and work: each asks for a reason, and works without scripts as a page of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.models import Run, WorkUnit
from controlplane.permissions import Action
from controlplane.services import runs as run_services
from controlplane.services import work as work_services
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import show
from frontend.outcomes import Problems, refusals
from frontend.queries import whole_of
from frontend.views.runs import run_of


@dataclass(frozen=True, slots=True)
class Verb:
    """One control of a run."""

    label: str
    done: str
    explains: str
    act: Callable[..., Run]
    dangerous: bool = False


VERBS: dict[str, Verb] = {
    "pause": Verb(
        "Pause",
        "is paused",
        "No new groups and no new steps begin; what is under way goes on to its end. Nothing is lost.",
        run_services.run_pause,
    ),
    "resume": Verb(
        "Resume",
        "goes on",
        "The run goes on from where it stands. The dead letters that stopped a failed run are replayed.",
        run_services.run_resume,
    ),
    "stop": Verb(
        "Stop",
        "is stopped",
        "The run ends for good and its work is cancelled. Its versions stay, and it can be forked.",
        run_services.run_stop,
        dangerous=True,
    ),
}


@require_http_methods(["GET", "POST"])
@page()
def run_control(request: HttpRequest, _access: Access, run_id: UUID, verb: str) -> HttpResponse:
    """Pause, resume or stop a run."""
    access, run = run_of(request, run_id)
    require(access, Action.RUNS_CONTROL)
    if verb not in VERBS:
        raise Http404("a run can be paused, resumed or stopped")
    chosen = VERBS[verb]
    act = Act(
        title=f"{chosen.label} {run.name}",
        explains=chosen.explains,
        label=chosen.label,
        back=reverse("run", args=[run.pk]),
        section="runs",
        perform=lambda reason, _: chosen.act(run=run, actor=access.actor, reason=reason),
        done=f"{run.name} {chosen.done}",
        dangerous=chosen.dangerous,
    )
    return ask(request, access, act)


@require_http_methods(["GET", "POST"])
@page()
def run_fork(request: HttpRequest, _access: Access, run_id: UUID) -> HttpResponse:
    """Start a new run from the weights after one of this run's steps."""
    access, run = run_of(request, run_id)
    require(access, Action.RUNS_CONTROL)
    problems = Problems()
    if request.method == "POST":
        step = whole_of(request.POST, "step_number")
        if step is None:
            problems.add("Give the number of a published step; 0 is the start", "step_number")
        elif step and not run.steps.filter(number=step, version__isnull=False).exists():
            problems.add(f"There is no published step {step}", "step_number")
        overrides = _overrides(request.POST.get("overrides", ""), problems)
        name = request.POST.get("name", "").replace("\x00", "").strip()
        if not problems and step is not None:
            with refusals(problems, {"name": "name", "step_number": "step_number", "spec": "overrides"}):
                fork = run_services.run_fork(
                    run=run, step_number=step, name=name, overrides=overrides, actor=access.actor, user=access.user
                )
                messages.success(request, f"{fork.name} starts from step {step} of {run.name}")
                return redirect("run", fork.pk)
    context = {
        "run": run,
        "steps": run.steps.filter(version__isnull=False).order_by("-number").values_list("number", flat=True)[:200],
        "problems": problems,
        "values": request.POST,
    }
    return show(request, access, "frontend/run_fork.html", context, section="runs", status=422 if problems else 200)


def _overrides(text: str, problems: Problems) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.add(f"This is not JSON: {error}", "overrides")
        return {}
    if not isinstance(value, dict):
        problems.add('Give an object, for example {"seed": 2}', "overrides")
        return {}
    return value


@require_http_methods(["GET", "POST"])
@page()
def work_replay(request: HttpRequest, _access: Access, unit_id: UUID) -> HttpResponse:
    """Give a dead letter fresh attempts."""
    unit = WorkUnit.objects.filter(pk=unit_id).first()
    if unit is None:
        raise Http404("there is no such unit of work")
    access = access_of(request, unit.project_id)
    require(access, Action.WORK_REPLAY)
    act = Act(
        title=f"Replay {unit.kind} work",
        explains="It is queued again with a fresh set of attempts. Mend what killed it first, or it dies again.",
        label="Replay",
        back=reverse("work_unit", args=[unit.pk]),
        section="work",
        perform=lambda reason, _: work_services.work_replay(unit=unit, actor=access.actor, reason=reason),
        done="The unit is queued again with fresh attempts",
    )
    return ask(request, access, act)
