"""Whose fault an error is: machines', or the environment's own; never the policy's, whose failures are no errors."""

import inspect

import pytest

from rl_core import errors
from rl_core.environments.blame import fault_of
from rl_core.types import Fault

ENVIRONMENT = [
    "EnvironmentFault",
    "TaskSetError",
    "TrajectoryError",
    "RemoteFailed",
    "RemoteProtocolError",
    "PatchRefused",
]
INFRASTRUCTURE = [
    "WorldError",
    "SandboxRefused",
    "EngineUnreachable",
    "StoreUnavailable",
    "RemoteUnreachable",
    "ModelError",
]


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environments_own_code_and_data(name):
    assert fault_of(getattr(errors, name)("x")) is Fault.ENVIRONMENT


@pytest.mark.parametrize("name", INFRASTRUCTURE)
def test_machines(name):
    assert fault_of(getattr(errors, name)("x")) is Fault.INFRASTRUCTURE


def test_no_error_is_blamed_on_the_policy():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RlCoreError)]
    assert len(kinds) > 20
    assert {fault_of(kind("x")) for kind in kinds} == {Fault.ENVIRONMENT, Fault.INFRASTRUCTURE}
