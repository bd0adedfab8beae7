"""Environments as a project knows them: those that ship, and the remote ones that it registered."""

from __future__ import annotations

import uuid

import msgspec

from controlplane.models import RemoteEnvironment
from controlplane.services.sealing import unseal
from rl_core.environments.environment import Environment
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.remote.client import RemotePlace
from rl_core.environments.remote.environment import Remote
from rl_core.environments.remote.protocol import Kind

PURPOSE = "remote_environments"


def environments_of(project_id: uuid.UUID) -> list[Environment]:
    """All of them, by name."""
    remotes = RemoteEnvironment.objects.filter(project=project_id)
    return sorted([*ENVIRONMENTS.values(), *(remote_of(row).environment for row in remotes)], key=lambda one: one.slug)


def environment_of(project_id: uuid.UUID, slug: str) -> Environment | None:
    """One of them."""
    if slug in ENVIRONMENTS:
        return ENVIRONMENTS[slug]
    remote = remote_named(project_id, slug)
    return remote.environment if remote else None


def remote_named(project_id: uuid.UUID, slug: str) -> Remote | None:
    """A remote one, with the secret that both sides sign with."""
    row = RemoteEnvironment.objects.filter(project=project_id, slug=slug).first()
    return remote_of(row) if row else None


def remote_of(row: RemoteEnvironment) -> Remote:
    """A row as the library sees it."""
    return Remote(
        slug=row.slug,
        title=row.title,
        kind=Kind(row.kind),
        place=RemotePlace(row.url, unseal(row.sealed_secret, purpose=PURPOSE)),
        description=msgspec.json.encode(row.description),
        session_s=row.session_s,
        max_turns=row.max_turns,
    )
