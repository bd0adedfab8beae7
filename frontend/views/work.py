"""Units of work, their attempts, dead letters."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.models import WorkUnit
from controlplane.selectors.pages_runs import going_topics
from controlplane.selectors.pages_work import WorkFilter, work_page
from controlplane.states import WorkKind, WorkState
from frontend.access import Access, access_of, page
from frontend.frame import follow, show
from frontend.queries import choice_of, uuid_of


@require_safe
@page()
def work_list(request: HttpRequest, access: Access) -> HttpResponse:
    """All units of work, dead letters first by default."""
    live = follow(access, *going_topics(access.project))
    asked = "state" in request.GET
    wanted = WorkFilter(
        state=choice_of(request.GET, "state", WorkState.values) if asked else WorkState.DEAD.value,
        kind=choice_of(request.GET, "kind", WorkKind.values),
        run=uuid_of(request.GET, "run"),
        before=uuid_of(request.GET, "before"),
    )
    context = {
        "page": work_page(access.project, wanted),
        "wanted": wanted,
        "states": WorkState.values,
        "kinds": WorkKind.values,
    }
    return show(
        request, access, "frontend/work.html", context, section="work", live=live, part="frontend/work_part.html"
    )


@require_safe
@page()
def work_detail(request: HttpRequest, _access: Access, unit_id: UUID) -> HttpResponse:
    """One unit with every attempt at it."""
    unit = WorkUnit.objects.select_related("run").filter(pk=unit_id).first()
    if unit is None:
        raise Http404("there is no such unit of work")
    access = access_of(request, unit.project_id)
    context = {"unit": unit, "attempts": unit.attempts.order_by("-number")[:100]}
    return show(request, access, "frontend/work_unit.html", context, section="work")
