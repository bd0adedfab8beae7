"""Reads for the API: projects, people, keys."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.models import ApiKey, Membership, Project, User


def project_of_slug(slug: str) -> Project | None:
    """The project, whoever asks."""
    return Project.objects.filter(slug=slug).first()


def projects_of_user(user: User) -> QuerySet[Project]:
    """The projects in which the user has a role."""
    return Project.objects.filter(memberships__user=user)


def memberships_of_user(user: User) -> list[Membership]:
    """The user's roles with their projects, by slug."""
    return list(Membership.objects.filter(user=user).select_related("project").order_by("project__slug"))


def memberships_of(project: Project) -> QuerySet[Membership]:
    """Roles in the project."""
    return Membership.objects.filter(project=project).select_related("user")


def users_of(project: Project) -> QuerySet[User]:
    """People of the project."""
    return User.objects.filter(memberships__project=project)


def user_of_name(username: str) -> User | None:
    """An active login by name."""
    return User.objects.filter(username=username, is_active=True).first()


def keys_of(project: Project) -> QuerySet[ApiKey]:
    """Keys of the project, revoked ones too."""
    return ApiKey.objects.filter(project=project).select_related("created_by", "project")
