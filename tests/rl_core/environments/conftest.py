"""One sandboxd for the environments that need one."""

import pytest

from tests.rl_core.sandbox_process import running_sandboxd


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    with running_sandboxd(tmp_path_factory.mktemp("worlds")) as daemon:
        yield daemon.client
