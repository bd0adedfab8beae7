"""What the web process needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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


@pytest.fixture(autouse=True)
async def no_task_outlives_its_test() -> AsyncIterator[None]:
    """Cancel what a test leaves running as a loop does that closes: once."""
    yield
    mine = asyncio.current_task()
    left = {task for task in asyncio.all_tasks() if task is not mine}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=10)
    left = {task for task in asyncio.all_tasks() if task is not mine}
    assert not left, f"tasks do not end: {left}"
