"""Who is asking: a person with a session, or an API key. The API, the websocket and the gateway share this."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import ApiKey, Membership, Project, User
from controlplane.permissions import Action, allowed
from controlplane.services.events import Actor
from controlplane.states import ActorKind


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: exactly one of user and key is set."""

    user: User | None = None
    key: ApiKey | None = None

    @property
    def actor(self) -> Actor:
        """The caller as the event log names it."""
        if self.key is not None:
            return Actor(ActorKind.API_KEY, f"{self.key.name} ({self.key.prefix})")
        assert self.user is not None
        return Actor(ActorKind.USER, self.user.username)

    @property
    def person(self) -> User | None:
        """Who answers for what the caller does: the user, or who made the key. None when the system made it."""
        return self.key.created_by if self.key is not None else self.user

    @property
    def identity(self) -> str:
        """Stable text that tells callers apart, for idempotency keys and limits."""
        return f"key:{self.key.pk}" if self.key is not None else f"user:{self.user.pk if self.user else ''}"

    def grant(self, project: Project) -> str | list[str] | None:
        """The caller's role (users) or scopes (keys) in the project; None when the project is not theirs to see."""
        if self.key is not None:
            return list(self.key.scopes) if self.key.project_id == project.pk else None
        membership = Membership.objects.filter(project=project, user=self.user).only("role").first()
        return membership.role if membership else None

    def may(self, project: Project, action: Action) -> bool:
        """Whether the caller may do this in the project."""
        grant = self.grant(project)
        return grant is not None and allowed(grant, action)
