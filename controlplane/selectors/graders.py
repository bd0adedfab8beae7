"""What a project's graders may reach and which secrets its rubrics may name, as the operator has it."""

from __future__ import annotations

import msgspec
from django.conf import settings

from controlplane.models import Project
from rl_core.destinations import Reach
from rl_core.environments.criteria.outside import Outside, Secret, check_secrets
from rl_core.errors import GraderRefused


def graders_of(project: Project) -> Outside:
    """The project's, read anew each time: a secret that was changed counts at once. Raises: GraderRefused."""
    secrets = {
        name: secret
        for name, secret in _read_secrets().items()
        if not secret.projects or project.slug in secret.projects
    }
    return Outside(Reach(settings.GRADER_NETWORKS, "GRADER_NETWORKS"), secrets)


def _read_secrets() -> dict[str, Secret]:
    path = settings.GRADER_SECRETS
    if path is None:
        return {}
    try:
        if path.stat().st_mode & 0o007:
            raise GraderRefused(f"{path} (GRADER_SECRETS) is open to everybody on this machine; chmod it to 600")
        secrets = msgspec.json.decode(path.read_bytes(), type=dict[str, Secret])
        check_secrets(secrets)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        if isinstance(error, GraderRefused):
            raise
        raise GraderRefused(f"{path} (GRADER_SECRETS) cannot be read: {error}") from error
    return secrets
