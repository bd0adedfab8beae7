"""`/me`, `/projects`, users, memberships, keys."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.base import ActionView, DetailView, ListView, Post, one
from controlplane.api.filters import MembershipFilter
from controlplane.api.pagination import Keyset
from controlplane.api.serializers.base import ReasonInput
from controlplane.api.serializers.tenancy import (
    KeyCreatedSerializer,
    KeyInput,
    KeySerializer,
    MembershipInput,
    MembershipSerializer,
    MeSerializer,
    ProjectInput,
    ProjectSerializer,
    UserInput,
    UserSerializer,
)
from controlplane.errors import Forbidden, Invalid
from controlplane.models import ApiKey, Membership, Project, User
from controlplane.permissions import Action, allowed
from controlplane.selectors import api_tenancy as select
from controlplane.services import tenancy
from controlplane.states import ActorKind, Consent, MemberRole, Scope


class Me(DetailView):
    """Who is asking, and what they may do where."""

    project_scoped = False
    serializer_class = MeSerializer

    def row(self) -> dict[str, Any]:
        """The caller."""
        key = self.principal.key
        if key is not None:
            grants = [_grant(key.project, role=None, scopes=list(key.scopes))]
            return {"kind": ActorKind.API_KEY.value, "name": key.name, "grants": grants}
        assert self.principal.user is not None
        memberships = select.memberships_of_user(self.principal.user)
        grants = [_grant(membership.project, role=membership.role, scopes=[]) for membership in memberships]
        return {"kind": ActorKind.USER.value, "name": self.principal.user.username, "grants": grants}


def _grant(project: Project, *, role: str | None, scopes: list[str]) -> dict[str, Any]:
    held: Any = role if role is not None else scopes
    actions = [action.value for action in Action if allowed(held, action)]
    return {"project": project, "role": role, "scopes": scopes, "actions": actions}


class ProjectList(Post, ListView):
    """Projects of the caller. An owner of one project, or a member of staff, may open another."""

    project_scoped = False
    serializer_class = ProjectSerializer
    input_serializer = ProjectInput

    def rows(self) -> QuerySet[Project]:
        """The key's project, or those in which the user has a role."""
        if self.principal.key is not None:
            return Project.objects.filter(pk=self.principal.key.project_id)
        assert self.principal.user is not None
        return select.projects_of_user(self.principal.user)

    def perform(self, data: dict[str, Any]) -> Project:
        """Open a project, whose owner is the caller."""
        user = self.principal.user
        if user is None:
            raise Forbidden("a key belongs to one project; log in to open another")
        if not user.is_staff and not Membership.objects.filter(user=user, role=MemberRole.OWNER).exists():
            raise Forbidden("only an owner of a project may open another; ask one")
        consent = Consent(data["consent"])
        return tenancy.project_create(
            slug=data["slug"], name=data["name"], consent=consent, owner=user, actor=self.actor
        )

    def kept_under(self, value: Any) -> Project | None:
        """The new project itself."""
        return value if isinstance(value, Project) else None


class ProjectDetail(DetailView):
    """One project."""

    serializer_class = ProjectSerializer

    def row(self) -> Project:
        """The project of the path."""
        return self.project


class UserList(Post, ListView):
    """People of the project."""

    actions = {"GET": Action.READ, "POST": Action.PROJECT_MANAGE}
    serializer_class = UserSerializer
    input_serializer = UserInput
    keyset = Keyset("id", int, descending=False)

    def rows(self) -> QuerySet[User]:
        """Members."""
        return select.users_of(self.project)

    def perform(self, data: dict[str, Any]) -> User:
        """Create a login with a role here."""
        role = MemberRole(data.pop("role"))
        return tenancy.user_create(project=self.project, role=role, actor=self.actor, **data)


class MembershipList(Post, ListView):
    """Roles in the project. POST gives somebody a role, or another role than before."""

    actions = {"GET": Action.READ, "POST": Action.PROJECT_MANAGE}
    serializer_class = MembershipSerializer
    input_serializer = MembershipInput
    filterset_class = MembershipFilter
    success_status = 200

    def rows(self) -> QuerySet[Membership]:
        """Roles."""
        return select.memberships_of(self.project)

    def perform(self, data: dict[str, Any]) -> Membership:
        """Set the role."""
        user = select.user_of_name(data["username"])
        if user is None:
            raise Invalid("there is no such user; create them first", "username")
        return tenancy.membership_set(
            project=self.project, user=user, role=MemberRole(data["role"]), actor=self.actor, reason=data["reason"]
        )


class MembershipDetail(DetailView):
    """One role. DELETE takes the user out of the project."""

    actions = {"GET": Action.READ, "DELETE": Action.PROJECT_MANAGE}
    serializer_class = MembershipSerializer

    def row(self) -> Membership:
        """The role of the path."""
        membership: Membership = one(select.memberships_of(self.project), "membership", pk=self.kwargs["id"])
        return membership

    def delete(self, request: Request, **kwargs: Any) -> Response:
        """Remove it."""
        tenancy.membership_remove(membership=self.row(), actor=self.actor)
        return Response(status=204)


class KeyList(Post, ListView):
    """API keys. The answer to a creation is the only time that a key is shown."""

    actions = {"GET": Action.PROJECT_MANAGE, "POST": Action.PROJECT_MANAGE}
    serializer_class = KeySerializer
    input_serializer = KeyInput
    answer_serializer = KeyCreatedSerializer
    secret_fields = frozenset({"key"})

    def rows(self) -> QuerySet[ApiKey]:
        """Keys, revoked ones too."""
        return select.keys_of(self.project)

    def perform(self, data: dict[str, Any]) -> ApiKey:
        """Make a key."""
        key, text = tenancy.api_key_create(
            project=self.project,
            name=data["name"],
            scopes=[Scope(scope) for scope in data["scopes"]],
            expires_at=data["expires_at"],
            created_by=self.principal.person,
            actor=self.actor,
        )
        key.key = text  # type: ignore[attr-defined]
        return key


class KeyDetail(DetailView):
    """One key."""

    actions = {"GET": Action.PROJECT_MANAGE}
    serializer_class = KeySerializer

    def row(self) -> ApiKey:
        """The key of the path."""
        key: ApiKey = one(select.keys_of(self.project), "key", pk=self.kwargs["id"])
        return key


class KeyRevoke(ActionView):
    """End a key at once."""

    actions = {"POST": Action.PROJECT_MANAGE}
    serializer_class = KeySerializer
    input_serializer = ReasonInput

    def perform(self, data: dict[str, Any]) -> ApiKey:
        """Revoke it."""
        key = one(select.keys_of(self.project), "key", pk=self.kwargs["id"])
        return tenancy.api_key_revoke(key=key, actor=self.actor, reason=data["reason"])
