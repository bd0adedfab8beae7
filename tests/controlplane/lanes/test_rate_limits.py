"""Limits of senders and actors: in Valkey, in this process while Valkey is away, and as 429 with Retry-After."""

from __future__ import annotations

import uuid

import pytest

from controlplane.errors import Throttled
from controlplane.models import Feedback, RejectedPayload
from controlplane.processes.ports import free_port
from controlplane.services import limits
from controlplane.services.entries import Receipt, Sender
from controlplane.services.feedback import feedback_receive_many
from controlplane.services.limits import LocalBuckets, Take, limits_take
from controlplane.services.sources import source_create
from rl_core.store import open_store
from tests.lane_rows import ACTOR, lane_world, thumbs


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def take(bucket, events, per_minute=60):
    [grant] = limits_take([Take(bucket, events, per_minute)])
    return grant


def test_a_bucket_holds_a_minutes_worth_and_says_when_to_come_back():
    bucket = uuid.uuid4().hex
    assert take(bucket, 50) == (50, 0.0)
    events, wait_s = take(bucket, 50)
    assert events == 10
    assert 0.5 < wait_s <= 1.0  # one event a second
    events, wait_s = take(bucket, 1)
    assert events == 0
    assert 0 < wait_s <= 1.0


def test_buckets_are_apart_and_asked_together():
    names = [uuid.uuid4().hex for _ in range(3)]
    grants = limits_take([Take(name, 100, 60 * (number + 1)) for number, name in enumerate(names)])
    assert [grant.events for grant in grants] == [60, 100, 100]
    assert limits_take([]) == []


def test_a_bucket_in_this_process_fills_with_time():
    buckets = LocalBuckets()
    assert buckets.take([Take("a", 100, 60)], now_us=0) == [(60, 1.0)]
    assert buckets.take([Take("a", 1, 60)], now_us=500_000) == [(0, 0.5)]
    assert buckets.take([Take("a", 1, 60)], now_us=1_000_000) == [(1, 1.0)]
    assert buckets.take([Take("a", 100, 60)], now_us=31_000_000) == [(30, 1.0)]
    assert buckets.take([Take("a", 1, 60)], now_us=10_000_000_000) == [(1, 0.0)]


def test_valkey_and_this_process_agree():
    bucket, local = uuid.uuid4().hex, LocalBuckets()
    for events in (7, 0, 11, 30, 40, 3):
        theirs, ours = take(bucket, events, 50), local.take([Take("a", events, 50)])[0]
        assert theirs.events == ours.events
        assert theirs.wait_s == pytest.approx(ours.wait_s, abs=0.2)


def test_while_valkey_is_away_this_process_limits(settings, monkeypatch):
    monkeypatch.setattr(limits, "_valkey", limits._Valkey())
    monkeypatch.setattr(limits, "_local", LocalBuckets())
    here, url = uuid.uuid4().hex, settings.REDIS_URL
    settings.REDIS_URL = f"redis://127.0.0.1:{free_port()}"
    assert take(here, 59).events == 59
    settings.REDIS_URL = url
    assert take(here, 59).events == 1, "it is not asked again at once"
    monkeypatch.setattr(limits._valkey, "away_until", 0.0)
    assert take(here, 59).events == 59, "and then it is"


@pytest.mark.django_db
def test_a_source_is_limited_and_what_is_over_is_not_kept(store):
    world = lane_world()
    generation = world.generate(store)
    source, _ = source_create(project=world.project, slug=f"s-{uuid.uuid4().hex[:8]}", actor=ACTOR, rate_per_minute=10)
    sender = Sender(world.project, source.slug, ACTOR, source)
    outcomes = feedback_receive_many(
        sender=sender, items=[thumbs(generation.id, actor={"hash": str(number)}) for number in range(15)]
    )
    assert [type(one) for one in outcomes] == [Receipt] * 10 + [Throttled] * 5
    assert 0 < outcomes[-1].wait <= 6
    with pytest.raises(Throttled) as caught:
        feedback_receive_many(sender=sender, items=[thumbs(generation.id)])
    assert 0 < caught.value.wait <= 6
    assert Feedback.objects.filter(project=world.project).count() == 10
    assert not RejectedPayload.objects.filter(project=world.project).exists()
    other = Sender(world.project, "another", ACTOR)
    assert isinstance(feedback_receive_many(sender=other, items=[thumbs(generation.id)])[0], Receipt)


@pytest.mark.django_db
def test_one_actor_of_a_source_is_limited_and_the_others_are_not(store):
    world = lane_world()
    generation = world.generate(store)
    source, _ = source_create(
        project=world.project, slug=f"s-{uuid.uuid4().hex[:8]}", actor=ACTOR, actor_rate_per_minute=5
    )
    sender = Sender(world.project, source.slug, ACTOR, source)
    flood = [thumbs(generation.id, actor={"hash": "loud"}) for _ in range(20)]
    quiet = [thumbs(generation.id, actor={"hash": f"quiet-{number}"}) for number in range(20)]
    nameless = [thumbs(generation.id, actor={}) for _ in range(20)]
    mixed = [body for trio in zip(flood, quiet, nameless, strict=True) for body in trio]
    outcomes = feedback_receive_many(sender=sender, items=mixed)
    assert [type(one) for one in outcomes[0::3]] == [Receipt] * 5 + [Throttled] * 15
    assert {type(one) for one in (*outcomes[1::3], *outcomes[2::3])} == {Receipt}
    assert "actor" in outcomes[-3].message


@pytest.mark.django_db
def test_a_replay_by_a_person_is_not_limited(store):
    world = lane_world()
    source, _ = source_create(project=world.project, slug=f"s-{uuid.uuid4().hex[:8]}", actor=ACTOR, rate_per_minute=1)
    sender = Sender(world.project, source.slug, ACTOR, source)
    items = [thumbs(world.generate(store).id) for _ in range(5)]
    outcomes = feedback_receive_many(sender=sender, items=items, limited=False)
    assert {type(one) for one in outcomes} == {Receipt}
