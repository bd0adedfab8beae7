"""REST framework's permission: the project in the path, and the view's action for the method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.api.authentication import principal_of
from controlplane.errors import Forbidden, NotFound
from controlplane.models import Project
from controlplane.permissions import allowed
from controlplane.principals import Principal

if TYPE_CHECKING:
    from controlplane.api.base import ApiView


class ProjectPermission(BasePermission):
    """Finds the project, hides it from strangers (404), and asks the matrix (403).

    A view names an action for each of its methods in `actions`; a method without one is refused. Views outside any
    project (`project_scoped = False`) only need a caller.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        """False without a caller (401). Raises: NotFound, Forbidden."""
        principal = principal_of(request)
        if principal is None:
            return False
        api_view: ApiView = view
        api_view.principal = principal
        if not api_view.project_scoped:
            return True
        project = self._project(principal, view)
        grant = principal.grant(project) if project else None
        if project is None or grant is None:
            raise NotFound("there is no such project, or you are no member of it", "project")
        action = api_view.actions.get("GET" if request.method == "HEAD" else request.method or "")
        if action is None or not allowed(grant, action):
            named = action.value if action else "nothing"
            held = grant if isinstance(grant, str) else "the key's scopes: " + (", ".join(grant) or "none")
            raise Forbidden(f"this needs permission for {named}, which {held} does not give")
        api_view.project = project
        return True

    def _project(self, principal: Principal, view: Any) -> Project | None:
        slug = view.kwargs.get("project")
        if slug is not None:
            return Project.objects.filter(slug=slug).first()
        return principal.key.project if principal.key is not None else None
