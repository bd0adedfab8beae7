"""Who looks at which project: the one door through which every page view goes.

A page about one thing takes its project from that thing, so that links can be shared; a list takes the project chosen
last. A project one is not a member of does not exist for one (404), an action one's role lacks is forbidden (403).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import render

from controlplane.models import Membership, Project, User
from controlplane.permissions import Action, allowed
from controlplane.selectors.pages_people import memberships_of
from controlplane.services.events import Actor
from controlplane.states import ActorKind

P = ParamSpec("P")
SESSION_KEY = "project"


@dataclass(frozen=True, slots=True)
class Access:
    """A logged-in user in one project."""

    user: User
    project: Project
    role: str

    @property
    def actor(self) -> Actor:
        """The user as the event log names them."""
        return Actor(ActorKind.USER, self.user.get_username())

    def may(self, action: Action) -> bool:
        """Whether the role permits the action."""
        return allowed(self.role, action)

    @property
    def can(self) -> dict[str, bool]:
        """Every action by name, for templates: `access.can.runs_control`."""
        return {action.value: self.may(action) for action in Action}


def access_of(request: HttpRequest, project_id: UUID | None = None, action: Action = Action.READ) -> Access:
    """The user's access to a project, by default the one chosen last, else their first.

    Raises: Http404 for a project the user is not a member of; PermissionDenied when the role lacks the action.
    """
    user = request.user
    if not isinstance(user, User):
        raise PermissionDenied("log in first")
    memberships = request_memberships(request)
    membership = _chosen(memberships, str(project_id or request.session.get(SESSION_KEY, "")), strict=bool(project_id))
    if membership is None:
        raise Http404("no such project, or you are not a member of it")
    if request.session.get(SESSION_KEY) != str(membership.project_id):
        request.session[SESSION_KEY] = str(membership.project_id)
    access = Access(user, membership.project, membership.role)
    if not access.may(action):
        raise PermissionDenied(f"your role here is {membership.role}, which may not do this: ask an owner")
    return access


def request_memberships(request: HttpRequest) -> list[Membership]:
    """The user's memberships, read once a request."""
    known: list[Membership] | None = getattr(request, "slipway_memberships", None)
    if known is None:
        known = memberships_of(request.user)
        request.slipway_memberships = known  # type: ignore[attr-defined]
    return known


def _chosen(memberships: list[Membership], project_id: str, *, strict: bool) -> Membership | None:
    for membership in memberships:
        if str(membership.project_id) == project_id:
            return membership
    return None if strict or not memberships else memberships[0]


def page(
    action: Action = Action.READ,
) -> Callable[
    [Callable[Concatenate[HttpRequest, Access, P], HttpResponseBase]],
    Callable[Concatenate[HttpRequest, P], HttpResponseBase],
]:
    """A view of the current project: logged in, a member, and permitted. The view gets its `Access`."""

    def decorate(
        view: Callable[Concatenate[HttpRequest, Access, P], HttpResponseBase],
    ) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
        @wraps(view)
        def wrapped(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            if not request_memberships(request):
                return render(request, "frontend/no_project.html", status=200)
            return view(request, access_of(request, action=action), *args, **kwargs)

        return cast(Callable[Concatenate[HttpRequest, P], HttpResponseBase], login_required(wrapped))

    return decorate
