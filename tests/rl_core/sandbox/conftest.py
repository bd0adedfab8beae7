"""One sandboxd for the whole folder."""

import pytest

from rl_core.sandbox import postgres
from tests.rl_core.sandbox_process import running_sandboxd

SECRET = "a-secret-of-the-host"


@pytest.fixture(scope="session")
def sandboxd(tmp_path_factory):
    mounts = [word for name, path in postgres.mounts().items() for word in ("--mount", f"{name}={path}")]
    folder = tmp_path_factory.mktemp("sandboxd")
    with running_sandboxd(folder, "--slots", "3", "--ahead", "0", *mounts, secret=SECRET) as daemon:
        yield daemon


@pytest.fixture
def sandbox(sandboxd):
    return sandboxd.client
