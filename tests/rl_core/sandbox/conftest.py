"""One sandboxd for the whole folder."""

import pytest

from tests.rl_core.sandbox_process import running_sandboxd

SECRET = "a-secret-of-the-host"


@pytest.fixture(scope="session")
def sandboxd(tmp_path_factory):
    with running_sandboxd(tmp_path_factory.mktemp("sandboxd"), "--slots", "3", secret=SECRET) as daemon:
        yield daemon


@pytest.fixture
def sandbox(sandboxd):
    return sandboxd.client
