"""Projects, people, and keys."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.contrib.postgres.fields import ArrayField
from django.db import models

from controlplane.models.base import Entity
from controlplane.states import Consent, MemberRole, Scope


class User(AbstractUser):
    """A person who logs in."""


class Project(Entity):
    """Tenant boundary: everything else belongs to one."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=200)
    consent = models.CharField(max_length=8, choices=Consent.choices, default=Consent.TRAIN)
    lending_allowed = models.BooleanField(default=False, help_text="rollouts may borrow replicas of serving clusters")

    def __str__(self) -> str:
        return self.slug


class Membership(Entity):
    """A user's role in a project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=MemberRole.choices)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "user"], name="membership_once")]

    def __str__(self) -> str:
        return f"{self.user_id}:{self.role}"


class ApiKey(Entity):
    """A scoped bearer key. Only its SHA-256 is kept; the key itself is shown once."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=200)
    prefix = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    scopes = ArrayField(models.CharField(max_length=16, choices=Scope.choices))
    source = models.ForeignKey(
        "controlplane.FeedbackSource",
        null=True,
        on_delete=models.CASCADE,
        related_name="keys",
        help_text="whose feedback comes under this key",
    )
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.prefix}…"


class IdempotencyRecord(Entity):
    """The answer given to a mutating call under an `Idempotency-Key`, for 24 hours."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    actor = models.CharField(max_length=80)
    key = models.CharField(max_length=200)
    request_hash = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    response = models.JSONField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "actor", "key"], name="idempotency_key_once")]

    def __str__(self) -> str:
        return self.key
