"""Loaded before Django's settings: gives tests a state folder of their own with running services.

Several pytest processes may run side by side: each has its own test database, Valkey database and channel prefix. The
services keep running between runs; `SLIPWAY_STATE=var/test ./manage.py services stop` ends them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import psycopg
import pytest

ROOT = Path(__file__).resolve().parent.parent
STATE = Path(os.environ.get("SLIPWAY_TEST_STATE", str(ROOT / "var" / "test")))
TEST_DATABASE = f"test_slipway_{os.getpid()}"

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["SLIPWAY_STATE"] = str(STATE)
os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"


def _start_services() -> None:
    from controlplane.errors import ControlPlaneError
    from controlplane.processes.services import services_start

    try:
        urls = services_start(STATE)
    except ControlPlaneError as error:
        raise pytest.UsageError(f"the services for the tests do not start: {error}") from error
    _forget_durability(urls.database_url)
    os.environ["DATABASE_URL"] = os.environ.get("TEST_DATABASE_URL", urls.database_url)
    os.environ["REDIS_URL"] = os.environ.get("TEST_REDIS_URL", f"{urls.redis_url}/{os.getpid() % 1000 + 1}")


def _forget_durability(url: str) -> None:
    """Test data may be lost with the machine: nothing waits for the disk. Speed only; behaviour is the same."""
    with psycopg.connect(url, autocommit=True) as connection:
        if connection.execute("SHOW fsync").fetchone() == ("on",):
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off")
            connection.execute("SELECT pg_reload_conf()")


_start_services()


def _drop_databases_of_dead_runs(url: str) -> None:
    with contextlib.suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as connection:
        names = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'test\\_slipway\\_%'").fetchall()
        for (name,) in names:
            pid = name.removeprefix("test_slipway_").split("_")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def pytest_configure(config: pytest.Config) -> None:
    """Names of this process alone."""
    from django.conf import settings

    settings.DATABASES["default"].setdefault("TEST", {})["NAME"] = TEST_DATABASE
    settings.CHANNEL_LAYERS["default"]["CONFIG"]["prefix"] = TEST_DATABASE
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # whitenoise warns without it
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # logins by the hundred
    # A session of tests that was killed leaves its database behind.
    if not hasattr(config, "workerinput"):
        _drop_databases_of_dead_runs(os.environ["DATABASE_URL"])


@pytest.fixture
def state_dir() -> Path:
    """The state folder of the tests."""
    return STATE


@pytest.fixture
def test_database_url(transactional_db: None) -> str:
    """The URL of this process's test database, for processes that a test starts."""
    from django.db import connection

    base, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    return f"{base}/{connection.settings_dict['NAME']}"
