"""Feedback finds its generation: early, raced, late, of an episode, of a bad version; or is given up."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.models import Event, Feedback, Generation
from controlplane.selectors.credit import feedback_credited
from controlplane.services.feedback import feedback_receive
from controlplane.services.joins import feedback_sweep
from controlplane.services.signals import signal_map_publish
from controlplane.states import FeedbackState
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, thumbs

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def receive(world, body, sender="key"):
    receipt = feedback_receive(project=world.project, sender=sender, source=None, data=body, actor=ACTOR)
    return Feedback.objects.get(id=receipt.feedback_id)


def episode(session, **changes):
    return thumbs(uuid.uuid4(), target={"kind": "episode", "id": session}, **changes)


def close_after(world, seconds, **thumb):
    rule = {"values": {"true": 1.0, "false": 0.0}, **thumb}
    signal_map_publish(
        project=world.project, content={"signals": {"thumbs": rule}, "horizon_s": seconds}, author=None, actor=ACTOR
    )


def age(row, seconds):
    type(row).objects.filter(id=row.id).update(created_at=F("created_at") - timedelta(seconds=seconds))


def now(row):
    """The row as it is now: its time is a part of its key, so that one whose time was changed cannot be refreshed."""
    return type(row).objects.get(id=row.id)


def test_feedback_past_its_horizon_is_late(store):
    world = lane_world()
    close_after(world, 3600)
    old, new = world.generate(store), world.generate(store)
    age(old, 3700)
    assert receive(world, thumbs(old.id)).state == FeedbackState.LATE
    assert receive(world, thumbs(new.id)).state == FeedbackState.JOINED
    close_after(world, 3600, horizon_s=7200)
    assert receive(world, thumbs(old.id, value=False)).state == FeedbackState.JOINED


def test_a_horizon_counts_arrival_not_what_the_sender_says(store):
    world = lane_world()
    close_after(world, 3600)
    old = world.generate(store)
    age(old, 3700)
    claimed = datetime.now(UTC) - timedelta(seconds=3650)
    assert receive(world, thumbs(old.id, occurred_at=claimed.isoformat())).state == FeedbackState.LATE


def test_early_feedback_on_a_bad_version_is_set_aside(store):
    world = lane_world()
    wanted = uuid.uuid4()
    row = receive(world, thumbs(wanted))
    version = world.lane.promoted_version
    version.quarantined_at = timezone.now()
    version.save(update_fields=["quarantined_at"])
    world.generate(store, generation_id=wanted)
    row.refresh_from_db()
    assert (row.state, row.generation_id) == (FeedbackState.QUARANTINED, wanted)


def test_an_early_join_is_told(store):
    world = lane_world()
    wanted = uuid.uuid4()
    for _ in range(3):
        receive(world, thumbs(wanted))
    world.generate(store, generation_id=wanted)
    told = Event.objects.get(project=world.project, type="feedback.changed")
    assert told.data == {"state": "joined", "count": 3}
    assert told.topic_id == f"lane:{world.lane.id}"


def test_the_sweep_joins_what_raced_by_the_answers_age_at_arrival(store):
    world = lane_world()
    close_after(world, 3600)
    generation = world.generate(store)
    rows = [receive(world, thumbs(generation.id)) for _ in range(2)]
    Feedback.objects.filter(id__in=[row.id for row in rows]).update(state="pending", generation_id=None)
    age(generation, 4000)
    age(rows[0], 4000)
    assert feedback_sweep() == 2
    assert [now(row).state for row in rows] == [FeedbackState.JOINED, FeedbackState.LATE]
    told = [event.data for event in Event.objects.filter(project=world.project, type="feedback.changed").order_by("id")]
    assert sorted(told, key=str) == [{"state": "joined", "count": 1}, {"state": "late", "count": 1}]


def test_the_sweep_never_joins_across_projects_or_to_what_was_erased(store):
    world, other = lane_world(), lane_world()
    foreign, gone = other.generate(store, session="s1"), world.generate(store)
    rows = [receive(world, thumbs(uuid.uuid4())), receive(world, episode("s1")), receive(world, thumbs(uuid.uuid4()))]
    Feedback.objects.filter(id=rows[0].id).update(target_id=str(foreign.id))
    Feedback.objects.filter(id=rows[2].id).update(target_id=str(gone.id))
    Generation.objects.filter(id=gone.id).update(erased_at=timezone.now())
    assert feedback_sweep() == 0
    assert set(Feedback.objects.filter(project=world.project).values_list("state", flat=True)) == {"pending"}


def test_what_never_finds_its_generation_is_given_up(store, settings):
    world = lane_world()
    row = receive(world, thumbs(uuid.uuid4()))
    age(row, settings.FEEDBACK_HORIZON_S + 10)
    kept = receive(world, thumbs(uuid.uuid4()))
    assert feedback_sweep() == 1
    assert (now(row).state, now(kept).state) == (FeedbackState.ORPHANED, FeedbackState.PENDING)
    told = Event.objects.get(project=world.project, type="feedback.changed")
    assert told.data == {"state": "orphaned", "count": 1}


def test_an_episode_that_is_not_there_yet_waits_for_its_first_turn(store):
    world = lane_world()
    row = receive(world, episode("s1"))
    assert row.state == FeedbackState.PENDING
    generation = world.generate(store, session="s1")
    row.refresh_from_db()
    assert (row.state, row.generation_id) == (FeedbackState.JOINED, generation.id)
    assert [e.distance for e in credit(world)[generation.id]] == [0]


def test_the_sweep_joins_episodes_too(store):
    world = lane_world()
    generation = world.generate(store, session="s1")
    row = receive(world, episode("s1"))
    Feedback.objects.filter(id=row.id).update(state="pending", generation_id=None)
    assert feedback_sweep() == 1
    row.refresh_from_db()
    assert (row.state, row.generation_id) == (FeedbackState.JOINED, generation.id)


def credit(world):
    rows = list(Generation.objects.filter(lane=world.lane))
    return feedback_credited(generations=rows, until=timezone.now() + timedelta(hours=1))


def turns(world, store, count, **changes):
    rows = [world.generate(store, session="s1", **changes) for _ in range(count)]
    for number, row in enumerate(reversed(rows)):
        age(row, 60 * (number + 1))
    return rows


def test_an_episodes_outcome_is_credited_to_its_turns_by_their_distance(store):
    world = lane_world()
    rows = turns(world, store, 4)
    stranger = world.generate(store, session="s1", user_key="somebody else")
    apart = world.generate(store, session="s2")
    age(stranger, 30)
    outcome = receive(world, episode("s1"))
    Feedback.objects.filter(id=outcome.id).update(generation_id=rows[-1].id)
    direct = receive(world, thumbs(rows[1].id, value=False))
    heard = credit(world)
    assert [[event.distance for event in heard[row.id]] for row in rows] == [[3], [2, 0], [1], [0]]
    assert [event.id for event in heard[rows[1].id]] == [outcome.id, direct.id]
    assert heard[stranger.id] == heard[apart.id] == []


def test_turns_after_the_outcome_have_no_part_in_it(store):
    world = lane_world()
    rows = turns(world, store, 3)
    middle = Generation.objects.get(id=rows[1].id).created_at
    receive(world, episode("s1", occurred_at=(middle + timedelta(seconds=1)).isoformat()))
    heard = credit(world)
    assert [[event.distance for event in heard[row.id]] for row in rows] == [[1], [0], []]


def test_a_clock_that_says_before_all_turns_is_not_believed(store):
    world = lane_world()
    rows = turns(world, store, 2)
    receive(world, episode("s1", occurred_at="2020-01-01T00:00:00Z"))
    heard = credit(world)
    assert [[event.distance for event in heard[row.id]] for row in rows] == [[1], [0]]


def test_credit_leaves_out_what_is_retracted_late_or_came_afterwards(store):
    world = lane_world()
    generation = world.generate(store, session="s1")
    for number, state in enumerate(("retracted", "late", "quarantined", "orphaned")):
        row = receive(world, thumbs(generation.id, actor={"hash": str(number)}))
        Feedback.objects.filter(id=row.id).update(state=state)
    rows = list(Generation.objects.filter(lane=world.lane))
    kept = receive(world, thumbs(generation.id))
    assert [event.id for event in credit(world)[generation.id]] == [kept.id]
    past = timezone.now() - timedelta(hours=1)
    assert feedback_credited(generations=rows, until=past) == {generation.id: []}
    assert feedback_credited(generations=[], until=past) == {}
