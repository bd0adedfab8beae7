"""Reads for the pages: people, projects, keys."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.models import ApiKey, Membership, Project, User


def memberships_of(user: Any) -> list[Membership]:
    """A user's projects, by name. Empty for who is not logged in."""
    if not isinstance(user, User):
        return []
    return list(Membership.objects.filter(user=user).select_related("project").order_by("project__name", "pk"))


def members_of(project: Project) -> QuerySet[Membership]:
    """The people of a project, by name."""
    return Membership.objects.filter(project=project).select_related("user").order_by("user__username")


def api_keys_of(project: Project) -> QuerySet[ApiKey]:
    """The keys of a project, newest first; revoked ones stay listed."""
    return ApiKey.objects.filter(project=project).select_related("created_by").order_by("-created_at")
