"""Rollouts: all of them, and one trajectory."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.selectors.pages_rollouts import (
    RolloutFilter,
    rollout_with_context,
    rollouts_page,
    scores_of,
    siblings_of,
)
from controlplane.selectors.pages_runs import run_names
from controlplane.selectors.pages_trajectory import trajectory_view
from controlplane.states import RolloutState
from frontend.access import Access, access_of, page
from frontend.frame import show
from frontend.queries import choice_of, number_of, text_of, uuid_of, whole_of
from rl_core.types import Split

_ORDERS = ("newest", "best", "worst")
_SPLITS = [split.value for split in Split]


@require_safe
@page()
def rollout_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All rollouts of the project, filtered by what the URL says."""
    query = request.GET
    wanted = RolloutFilter(
        run=uuid_of(query, "run"),
        step=whole_of(query, "step"),
        split=choice_of(query, "split", _SPLITS),
        state=choice_of(query, "state", RolloutState.values),
        task=text_of(query, "task"),
        reward_from=number_of(query, "reward_from"),
        reward_to=number_of(query, "reward_to"),
        order=choice_of(query, "order", _ORDERS, "newest"),
        after=text_of(query, "after"),
    )
    context = {
        "page": rollouts_page(access.project, wanted),
        "wanted": wanted,
        "runs": run_names(access.project),
        "splits": _SPLITS,
        "states": RolloutState.values,
        "orders": _ORDERS,
    }
    return show(request, access, "frontend/rollouts.html", context, section="rollouts")


@require_safe
@page()
def rollout_detail(request: HttpRequest, _access: Access, rollout_id: UUID) -> HttpResponse:
    """One trajectory: messages, tools, tokens, scores."""
    rollout = rollout_with_context(rollout_id)
    if rollout is None:
        raise Http404("there is no such rollout")
    access = access_of(request, rollout.group.task.task_set.project_id)
    siblings = siblings_of(rollout)
    position = next(index for index, sibling in enumerate(siblings) if sibling.pk == rollout.pk)
    context = {
        "rollout": rollout,
        "group": rollout.group,
        "task": rollout.group.task,
        "scores": scores_of(rollout),
        "siblings": siblings,
        "previous": siblings[position - 1] if position else None,
        "next": siblings[position + 1] if position + 1 < len(siblings) else None,
        "view": trajectory_view(rollout),
    }
    return show(request, access, "frontend/rollout.html", context, section="rollouts")
