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
    """End what a test leaves running, asking again: the layer's receiver can lose a cancellation in a race."""
    yield
    mine = asyncio.current_task()
    for _ in range(50):
        left = {task for task in asyncio.all_tasks() if task is not mine}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.2)
    raise AssertionError(f"tasks do not end: {left}")
