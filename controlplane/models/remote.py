"""What somebody else runs: remote worlds and environments, sessions of the latter, and what these asked the policy."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.runs import Rollout
from controlplane.models.tenancy import Project
from rl_core.environments.remote.protocol import Kind

KINDS = [(kind.value, kind.value) for kind in Kind]


class RemoteEnvironment(Entity):
    """A remote world or environment that a project registered. `description` is what it said of itself then."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="remote_environments")
    slug = models.SlugField(max_length=64)
    title = models.CharField(max_length=200)
    kind = models.CharField(max_length=12, choices=KINDS)
    url = models.CharField(max_length=1000)
    sealed_secret = models.TextField()
    description = models.JSONField()
    session_s = models.PositiveIntegerField(help_text="how long a session may take before it is ended")
    max_turns = models.PositiveSmallIntegerField(help_text="of evaluations outside a run")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="remote_environment_once")]

    def __str__(self) -> str:
        return self.slug


class RolloutSession(Entity):
    """One session of a remote environment for one attempt, open until `ended_at`. Only the key's SHA-256 is kept."""

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="sessions")
    environment = models.ForeignKey(RemoteEnvironment, on_delete=models.PROTECT, related_name="sessions")
    digest = models.CharField(max_length=64, unique=True)
    deadline_at = models.DateTimeField(help_text="moves on when it is accepted")
    accepted_at = models.DateTimeField(null=True, help_text="when the environment said that it plays it")
    result = models.JSONField(null=True)
    ended_at = models.DateTimeField(null=True)
    reason = models.CharField(max_length=500, blank=True, help_text="why it was given up")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["rollout"], condition=models.Q(ended_at__isnull=True), name="rollout_session_open_once"
            )
        ]

    def __str__(self) -> str:
        return str(self.pk)


class RolloutCall(Entity):
    """One answered call of a session. `context` is what a later call must begin with to go on from it, token by token.

    `mark` is what the client calls the request by, so that a repeat is known as one.
    """

    session = models.ForeignKey(RolloutSession, on_delete=models.CASCADE, related_name="calls")
    number = models.PositiveIntegerField()
    request = models.CharField(max_length=64)
    mark = models.CharField(max_length=200, blank=True)
    context = models.CharField(max_length=64)
    blob_key = models.CharField(max_length=300)
    sampled_tokens = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["session", "number"], name="rollout_call_number_once")]
        indexes = [models.Index(fields=["session", "context"]), models.Index(fields=["session", "request"])]

    def __str__(self) -> str:
        return f"{self.session_id}:{self.number}"
