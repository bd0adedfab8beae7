"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from pytest_django.plugin import DjangoDbBlocker

# A machine that is busy is no fault of the code: a hanging test has pytest's timeout.
hypothesis.settings.register_profile("slipway", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("slipway")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """The test database, which can be dropped in the end whatever still holds a connection: threads of async views."""
    yield
    from django.db import connection

    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
