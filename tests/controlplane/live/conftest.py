"""What the web process needs around it."""

from __future__ import annotations

import pytest
from django.conf import settings


@pytest.fixture(autouse=True, scope="session")
def _static_root() -> None:
    """whitenoise warns about a folder that `collectstatic` has not made yet."""
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)


@pytest.fixture(autouse=True)
def _fast_hashing(settings) -> None:
    """A million rounds of PBKDF2 a login say nothing about the API."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
