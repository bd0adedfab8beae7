"""What the home page lists as wrong: a silent run, unless it is in a long step."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from controlplane.models import Event, Run
from controlplane.selectors.pages_work import STALLED_AFTER, problems_of
from controlplane.services.events import run_topic
from controlplane.states import RunState, WorkKind, WorkState
from tests.domain_factories import make_run, make_unit

pytestmark = pytest.mark.django_db


def silent_run() -> Run:
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    Event.objects.filter(topic=run_topic(run.pk)).update(at=Now() - STALLED_AFTER - timedelta(minutes=1))
    return run


def named(run: Run) -> bool:
    return any(problem.kind == "run" and problem.subject == run.pk for problem in problems_of(run.project))


def test_a_running_run_without_events_is_named() -> None:
    run = silent_run()
    assert named(run)
    Event.objects.filter(topic=run_topic(run.pk)).update(at=Now())
    assert not named(run)


@pytest.mark.parametrize(
    ("kind", "state", "left_s", "silent"),
    [
        (WorkKind.TRAIN, WorkState.LEASED, 20, False),
        (WorkKind.TRAIN, WorkState.LEASED, -20, True),
        (WorkKind.TRAIN, WorkState.QUEUED, 20, True),
        (WorkKind.TRAIN, WorkState.DONE, 20, True),
        (WorkKind.ROLLOUT, WorkState.LEASED, 20, True),
    ],
)
def test_a_run_in_a_long_step_is_not_silent(kind: WorkKind, state: WorkState, left_s: int, silent: bool) -> None:
    run = silent_run()
    make_unit(run.project, kind=kind, run=run, state=state, lease_until=Now() + timedelta(seconds=left_s))
    assert named(run) == silent


def test_another_runs_step_hides_nothing() -> None:
    run = silent_run()
    other = make_run(run.project)
    lease = Now() + timedelta(seconds=20)
    make_unit(run.project, kind=WorkKind.TRAIN, run=other, state=WorkState.LEASED, lease_until=lease)
    assert named(run)
