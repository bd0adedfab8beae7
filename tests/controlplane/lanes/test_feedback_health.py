"""Delays and matured signals, by value."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.models import Feedback, Generation
from controlplane.selectors.feedback_health import feedback_delays, signals_matured
from controlplane.services.feedback import feedback_receive
from controlplane.services.signals import signal_define
from controlplane.states import Consent, SignalType
from rl_core.store import open_store
from tests.lane_rows import ACTOR, candidate_version, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def receive(world, body):
    return feedback_receive(project=world.project, sender="key", source=None, data=body, actor=ACTOR).feedback_id


def answered(world, store, *, ago_s=0.0, heard_after_s=None, **changes):
    """A generation so long ago, and thumbs so long after it."""
    version = changes.pop("version", None)
    generation = world.generate(store, **changes)
    row = Generation.objects.filter(id=generation.id)
    row.update(created_at=F("created_at") - timedelta(seconds=ago_s))
    if version is not None:
        row.update(version=version)
    if heard_after_s is not None:
        given = receive(world, thumbs(generation.id))
        Feedback.objects.filter(id=given).update(created_at=row.get().created_at + timedelta(seconds=heard_after_s))
    return generation


def test_delays_are_those_of_arrival(store):
    world, other = lane_world(), lane_world()
    assert feedback_delays(lane=world.lane) == feedback_delays(project=world.project)
    assert (feedback_delays(lane=world.lane).p95, feedback_delays(lane=world.lane).n) == (None, 0)
    for seconds in (10, 20, 30, 40, 50):
        answered(world, store, ago_s=1000, heard_after_s=seconds)
    answered(other, store, ago_s=1000, heard_after_s=900)
    found = feedback_delays(lane=world.lane)
    assert (found.p50, found.p95, found.n) == (30, 48, 5)
    assert feedback_delays(project=world.project) == found
    Feedback.objects.filter(project=world.project).update(state="late")
    assert feedback_delays(lane=world.lane) == found, "what came late says most"
    with pytest.raises(ValueError, match="name"):
        feedback_delays()


def test_feedback_before_its_answer_was_written_had_no_delay(store):
    world = lane_world()
    answered(world, store, ago_s=100, heard_after_s=-5)
    assert feedback_delays(lane=world.lane).p50 == 0


def test_signals_mature_when_their_answers_horizon_closes(store):
    world = lane_world()
    start = timezone.now() - timedelta(seconds=10_000)
    ages = (50, 150, 250)
    for ago_s in ages:
        answered(world, store, ago_s=ago_s, heard_after_s=1)

    def matured(since=start, horizon_s=0.0):
        return signals_matured(lane=world.lane, since=since, horizon_s=horizon_s)

    assert [matured(horizon_s=horizon) for horizon in (0, 100, 200, 300)] == [3, 2, 1, 0]
    # Those whose horizon of 100 s closed within the last 100 s: the one of 150 s ago.
    assert matured(since=timezone.now() - timedelta(seconds=100), horizon_s=100) == 1


def test_only_what_a_window_may_take_matures(store):
    world = lane_world()
    start = timezone.now() - timedelta(seconds=10_000)
    answered(world, store, ago_s=50, heard_after_s=1)
    answered(world, store, ago_s=50)
    answered(world, store, ago_s=50, heard_after_s=1, consent=Consent.EVAL)
    answered(world, store, ago_s=50, heard_after_s=1, version=candidate_version(world))
    silent = answered(world, store, ago_s=50)
    receive(world, thumbs(silent.id, consent="eval"))
    signal_define(project=world.project, slug="unmapped", value_type=SignalType.BOOLEAN)
    receive(world, thumbs(silent.id, signal="unmapped"))
    assert signals_matured(lane=world.lane, since=start, horizon_s=10) == 1
