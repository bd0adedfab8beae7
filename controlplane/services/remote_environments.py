"""Remote worlds and environments that a project registers."""

from __future__ import annotations

import msgspec
from django.db import transaction

from controlplane.errors import Invalid
from controlplane.models import Project, RemoteEnvironment
from controlplane.selectors.environments import PURPOSE, remote_of
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.sealing import seal
from controlplane.states import EventType
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.remote.messages import Described
from rl_core.errors import SpecError

MIN_SESSION_S, MAX_SESSION_S = 10, 24 * 3600


@transaction.atomic
def remote_environment_register(
    *,
    project: Project,
    slug: str,
    title: str,
    url: str,
    secret: str,
    described: Described,
    session_s: int,
    max_turns: int,
    actor: Actor,
) -> RemoteEnvironment:
    """Add a remote that was asked to describe itself, or take over what it says now. Raises: Invalid."""
    if slug in ENVIRONMENTS:
        raise Invalid(f"{slug!r} is an environment that ships; take another name", "slug")
    if not MIN_SESSION_S <= session_s <= MAX_SESSION_S:
        raise Invalid(f"a session takes {MIN_SESSION_S} to {MAX_SESSION_S} seconds, not {session_s}", "session_s")
    if not 1 <= max_turns <= 1000:
        raise Invalid(f"max_turns is 1 to 1000, not {max_turns}", "max_turns")
    present = RemoteEnvironment.objects.filter(project=project, slug=slug).first()
    if present is not None and present.kind != described.kind:
        raise Invalid(f"{slug!r} was a remote {present.kind}, and is a {described.kind.value} now", "slug")
    row, _ = RemoteEnvironment.objects.update_or_create(
        project=project,
        slug=slug,
        defaults={
            "title": title[:200],
            "kind": described.kind.value,
            "url": url,
            "sealed_secret": seal(secret, purpose=PURPOSE),
            "description": msgspec.to_builtins(described),
            "session_s": session_s,
            "max_turns": max_turns,
        },
    )
    try:
        _ = remote_of(row).environment
    except SpecError as error:
        raise Invalid(f"its description cannot be used: {error}", "url") from error
    event_append(
        project_id=project.pk,
        topic=project_topic(project.pk),
        event_type=EventType.ENVIRONMENT_REGISTERED,
        actor=actor,
        data={"environment": str(row.pk), "slug": slug, "kind": row.kind, "url": url},
    )
    return row
