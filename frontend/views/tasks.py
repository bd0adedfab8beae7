"""A task's history, and environments with their cheating watch."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.models import Alert, Task
from controlplane.selectors.difficulty import attempts_at, history_of, tried_task
from controlplane.selectors.environment_watch import Sign, watch_of
from controlplane.selectors.environments import environment_of, environments_of
from controlplane.states import AlertKind
from frontend.access import Access, access_of, page
from frontend.frame import show


@require_safe
@page()
def task_detail(request: HttpRequest, _access: Access, task_id: UUID) -> HttpResponse:
    """One task: what was tried, by which versions, and what came of it."""
    task = Task.objects.select_related("task_set").filter(pk=task_id).first()
    if task is None:
        raise Http404("there is no such task")
    access = access_of(request, task.task_set.project_id)
    history = history_of(task)
    context = {
        "task": task,
        "tried": tried_task(task),
        "history": history,
        "means": [row.mean_reward for row in history],
        "attempts": attempts_at(task),
    }
    return show(request, access, "frontend/task.html", context, section="task_sets")


@require_safe
@page()
def environment_list(request: HttpRequest, access: Access) -> HttpResponse:
    """Environments that the project can train in."""
    context = {"environments": environments_of(access.project.pk)}
    return show(request, access, "frontend/environments.html", context, section="environments")


@require_safe
@page()
def environment_detail(request: HttpRequest, access: Access, slug: str) -> HttpResponse:
    """One environment: what it is made of, and its cheating watch."""
    environment = environment_of(access.project.pk, slug)
    if environment is None:
        raise Http404("neither this build nor the project knows such an environment")
    alerts = Alert.objects.filter(
        project=access.project, kind=AlertKind.CHEATING, detail__environment=slug, resolved_at__isnull=True
    )
    context = {
        "environment": environment,
        "watch": watch_of(access.project, slug),
        "signs": list(Sign),
        "alerts": list(alerts.order_by("-created_at")),
    }
    return show(request, access, "frontend/environment.html", context, section="environments")
