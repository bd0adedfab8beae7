"""What page tests need around them: a played project that all of a module's tests look at, and a store of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from django.conf import settings as django_settings
from django.db import transaction

from controlplane.models import Run
from controlplane.selectors import pages_trajectory
from tests.factories import HOSTILE, Workspace, furnish, make_workspace
from tests.lane_story import Story, lane_story
from tests.playing import batch_step, kill_unit, play, start_run


@pytest.fixture(autouse=True, scope="session")
def _surroundings(tmp_path_factory) -> Iterator[None]:
    """A store that ends with the session, and the folder that whitenoise wants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(django_settings, "STORE_URL", tmp_path_factory.mktemp("store").as_uri())
        django_settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
        pages_trajectory._store.cache_clear()
        yield
        pages_trajectory._store.cache_clear()


@pytest.fixture(scope="module")
def played(django_db_setup, django_db_blocker) -> Iterator[tuple[Workspace, Run]]:
    """A run of two steps and a batched third, a dead letter, hostile text in every place that others can write."""
    with django_db_blocker.unblock(), transaction.atomic():
        workspace = furnish(make_workspace(name="A " + HOSTILE))
        run = start_run(workspace, name="Run " + HOSTILE, steps=3)
        play(run, 2, hostile=HOSTILE)
        batch_step(run, skill=0.5, luck=random.Random(2))
        kill_unit(run, error=HOSTILE)
        yield workspace, run
        transaction.set_rollback(True)


@pytest.fixture(scope="module")
def told(django_db_setup, django_db_blocker) -> Iterator[Story]:
    """A lane with a past, a canary under way and an alert, hostile text in every place that others can write."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield lane_story(hostile=HOSTILE)
        transaction.set_rollback(True)
