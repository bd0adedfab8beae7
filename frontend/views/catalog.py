"""Task sets and models."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.models import TaskSet
from controlplane.selectors.pages_catalog import models_of, task_sets_of, tasks_page
from frontend.access import Access, access_of, page
from frontend.frame import show
from frontend.queries import choice_of, whole_of
from rl_core.types import Split

_SPLITS = [split.value for split in Split]


@require_safe
@page()
def task_set_list(request: HttpRequest, access: Access) -> HttpResponse:
    """Task sets in all versions, and the models of the catalogue."""
    context = {"task_sets": task_sets_of(access.project), "models": models_of(access.project)}
    return show(request, access, "frontend/task_sets.html", context, section="task_sets")


@require_safe
@page()
def task_set_detail(request: HttpRequest, _access: Access, task_set_id: UUID) -> HttpResponse:
    """One version of a task set with its tasks."""
    task_set = TaskSet.objects.filter(pk=task_set_id).first()
    if task_set is None:
        raise Http404("there is no such task set")
    access = access_of(request, task_set.project_id)
    split = choice_of(request.GET, "split", _SPLITS, Split.TRAIN.value)
    tasks, following = tasks_page(task_set, split=split, after=whole_of(request.GET, "after") or 0)
    context = {"task_set": task_set, "tasks": tasks, "next": following, "split": split, "splits": _SPLITS}
    return show(request, access, "frontend/task_set.html", context, section="task_sets")
