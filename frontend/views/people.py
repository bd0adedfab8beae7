"""Members of the project, and its API keys."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.models import ApiKey, Membership
from controlplane.permissions import Action
from controlplane.selectors.pages_people import api_keys_of, members_of
from controlplane.services.tenancy import (
    api_key_create,
    api_key_revoke,
    membership_remove,
    membership_set,
    user_create,
)
from controlplane.states import MemberRole, Scope
from frontend.access import Access, access_of, page
from frontend.acts import Act, ask, require
from frontend.frame import show
from frontend.outcomes import Problems, refusals
from frontend.queries import choice_of, text_of, uuid_of, whole_of

_MAX_DAYS = 3650


@require_http_methods(["GET", "POST"])
@page()
def members(request: HttpRequest, access: Access) -> HttpResponse:
    """Who is in the project and in what role; owners change it."""
    problems = Problems()
    if request.method == "POST":
        require(access, Action.PROJECT_MANAGE)
        with refusals(problems, {"username": "username", "password": "password", "role": "role"}):
            messages.success(request, _change_members(request, access))
            return redirect("members")
    context = {
        "members": members_of(access.project),
        "roles": MemberRole.values,
        "problems": problems,
        "values": request.POST,
    }
    return show(request, access, "frontend/members.html", context, section="people", status=422 if problems else 200)


def _change_members(request: HttpRequest, access: Access) -> str:
    role = MemberRole(choice_of(request.POST, "role", MemberRole.values, MemberRole.VIEWER.value))
    if request.POST.get("act") == "create":
        user = user_create(
            project=access.project,
            username=text_of(request.POST, "username"),
            password=request.POST.get("password", ""),
            role=role,
            actor=access.actor,
        )
        return f"{user.username} can log in as {role.value}"
    wanted = uuid_of(request.POST, "membership")
    membership = Membership.objects.filter(project=access.project, pk=wanted).first() if wanted else None
    if membership is None:
        raise Http404("there is no such member")
    reason = text_of(request.POST, "reason")
    if request.POST.get("act") == "remove":
        membership_remove(membership=membership, actor=access.actor, reason=reason)
        return f"{membership.user.username} is no longer a member"
    membership_set(project=access.project, user=membership.user, role=role, actor=access.actor, reason=reason)
    return f"{membership.user.username} is {role.value} now"


@never_cache
@require_http_methods(["GET", "POST"])
@page(Action.PROJECT_MANAGE)
def keys(request: HttpRequest, access: Access) -> HttpResponse:
    """The project's API keys. A new key's text is in the answer to the form that made it, and nowhere else."""
    problems = Problems()
    secret, made = "", None
    if request.method == "POST":
        name = text_of(request.POST, "name")
        scopes = [scope for scope in request.POST.getlist("scopes") if scope in Scope.values]
        days = whole_of(request.POST, "days")
        if not name:
            problems.add("Give the key a name that says who uses it", "name")
        if not scopes:
            problems.add("Choose at least one scope", "scopes")
        if not problems:
            with refusals(problems, {"scopes": "scopes", "name": "name"}):
                made, secret = api_key_create(
                    project=access.project,
                    name=name,
                    scopes=[Scope(scope) for scope in scopes],
                    actor=access.actor,
                    created_by=access.user,
                    expires_at=timezone.now() + timedelta(days=min(days, _MAX_DAYS)) if days else None,
                )
    context = {
        "keys": api_keys_of(access.project),
        "scopes": [(scope.value, _SCOPE_HELP[scope]) for scope in Scope if scope in _SCOPE_HELP],
        "now": timezone.now(),
        "secret": secret,
        "made": made,
        "problems": problems,
        "values": request.POST if problems else {},
        "chosen": request.POST.getlist("scopes") if problems else [],
    }
    return show(request, access, "frontend/keys.html", context, section="keys", status=422 if problems else 200)


# `rollout` keys are made by the harness for one rollout, never by hand.
_SCOPE_HELP: dict[Scope, str] = {
    Scope.READ: "see everything",
    Scope.RUNS: "create and control runs",
    Scope.RELEASES: "propose, abort and roll back releases",
    Scope.RUBRICS: "publish rubric versions",
    Scope.FLEET: "add clusters, pin versions to replicas",
    Scope.EXPORT: "export versions and download their weights",
    Scope.ADMIN: "manage people and keys",
    Scope.FEEDBACK: "send feedback",
    Scope.GATEWAY: "call a lane's model",
}


@require_http_methods(["GET", "POST"])
@page()
def key_revoke(request: HttpRequest, _access: Access, key_id: UUID) -> HttpResponse:
    """End a key at once."""
    key = ApiKey.objects.filter(pk=key_id).first()
    if key is None:
        raise Http404("there is no such key")
    access = access_of(request, key.project_id, Action.PROJECT_MANAGE)
    act = Act(
        title=f"Revoke {key.name}",
        explains="Whoever uses the key is refused at once. It cannot be brought back.",
        label="Revoke",
        back=reverse("keys"),
        section="keys",
        perform=lambda reason, _: api_key_revoke(key=key, actor=access.actor, reason=reason),
        done=f"{key.name} is revoked",
        dangerous=True,
    )
    return ask(request, access, act)
