"""Whose fault it was that a rollout broke off. A policy's failures are no errors: they are graded, and trained on."""

from __future__ import annotations

from rl_core.errors import EnvironmentFault, RlCoreError, SandboxRefused, TrajectoryError, WorldError
from rl_core.types import Fault

# Worlds, sandboxes, engines and stores are machines; what is left of environments is their own code and data.
_MACHINES = (WorldError, SandboxRefused)
_ENVIRONMENTS = (EnvironmentFault, TrajectoryError)


def fault_of(error: RlCoreError) -> Fault:
    """The fault of an error that ended a session, `environment` or `infrastructure`: the session is tried again."""
    if isinstance(error, _ENVIRONMENTS) and not isinstance(error, _MACHINES):
        return Fault.ENVIRONMENT
    return Fault.INFRASTRUCTURE
