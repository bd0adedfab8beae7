"""Task sets and models."""

from __future__ import annotations

import re
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.models import TaskSet, TaskSetProof
from controlplane.permissions import Action
from controlplane.selectors.difficulty import TaskOrder, set_difficulty, tried_tasks
from controlplane.selectors.environments import environments_of
from controlplane.selectors.pages_catalog import models_of, task_sets_of
from controlplane.selectors.task_sets import task_set_versions
from controlplane.services.task_sets import TaskFile, task_set_upload
from frontend.access import Access, access_of, page
from frontend.frame import show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of, text_of, whole_of
from rl_core.types import Split

_SLUG = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPLITS = [split.value for split in Split]


_ORDERS = [order.value for order in TaskOrder]


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def task_set_list(request: HttpRequest, access: Access) -> HttpResponse:
    """Task sets in all versions, and the models of the catalogue. POST takes a file as the next version of a set."""
    problems = Problems()
    if request.method == "POST":
        with refusals(problems, {"environment": "environment", "tasks": "file"}):
            stored = _upload(request, access, problems)
            if stored is not None:
                messages.success(request, f"{stored.slug} version {stored.version} is stored")
                return redirect("task_set", stored.pk)
    context = {
        "task_sets": task_sets_of(access.project),
        "models": models_of(access.project),
        "environments": environments_of(access.project.pk),
        "values": {"slug": text_of(request.POST, "slug"), "environment": text_of(request.POST, "environment")},
        "problems": problems,
    }
    status = 422 if problems else 200
    return show(request, access, "frontend/task_sets.html", context, section="task_sets", status=status)


def _upload(request: HttpRequest, access: Access, problems: Problems) -> TaskSet | None:
    """The set that a form's file was stored as; None with what is wrong in `problems`. Raises: ControlPlaneError."""
    if not access.may(Action.CATALOG_WRITE):
        raise PermissionDenied(f"your role here is {access.role}, which may not store task sets: ask an owner")
    file, slug = request.FILES.get("file"), text_of(request.POST, "slug")
    if not _SLUG.fullmatch(slug):
        problems.add("a name of letters, digits, _ and - is needed", "slug")
    if file is None:
        problems.add("choose a file", "file")
    if problems or file is None:
        return None
    kind = TaskFile.PARQUET if str(file.name).lower().endswith(".parquet") else TaskFile.JSONL
    return task_set_upload(
        project=access.project,
        slug=slug,
        environment=text_of(request.POST, "environment"),
        content=file.read(),
        kind=kind,
        actor=access.actor,
    )


@require_safe
@page()
def task_set_detail(request: HttpRequest, _access: Access, task_set_id: UUID) -> HttpResponse:
    """One version of a task set: its proof, how hard its tasks are, and the tasks."""
    task_set = TaskSet.objects.filter(pk=task_set_id).first()
    if task_set is None:
        raise Http404("there is no such task set")
    access = access_of(request, task_set.project_id)
    split = choice_of(request.GET, "split", _SPLITS, Split.TRAIN.value)
    order = TaskOrder(choice_of(request.GET, "order", _ORDERS, TaskOrder.FILE.value))
    tasks, following = tried_tasks(task_set, split=split, order=order, after=whole_of(request.GET, "after") or 0)
    context = {
        "task_set": task_set,
        "versions": task_set_versions(task_set),
        "proof": TaskSetProof.objects.filter(task_set=task_set).first(),
        "difficulty": set_difficulty(task_set, split=split),
        "tasks": tasks,
        "next": following,
        "split": split,
        "splits": _SPLITS,
        "order": order.value,
        "orders": _ORDERS,
    }
    return show(request, access, "frontend/task_set.html", context, section="task_sets")
