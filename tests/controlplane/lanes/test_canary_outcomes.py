"""What a canary is judged by: each metric's query by value, the reward's against the function that it stands for."""

from __future__ import annotations

import random
import uuid
from collections import defaultdict
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.models import Feedback, FeedbackSource, Generation, SignalDefinition
from controlplane.selectors.canary_outcomes import canary_rows
from controlplane.services.clock import database_now
from controlplane.services.releases import release_spec
from controlplane.services.signals import reward_of, signal_define, signal_map_publish
from controlplane.services.windows import signal_map_current
from controlplane.states import Arm, GenerationOutcome, SignalType
from rl_core.shipping.specs import MetricSource
from tests.lane_rows import ACTOR
from tests.shipping_rig import GOAL, Users, canary_spec, shipping_world, step_of, to_canary

pytestmark = pytest.mark.django_db


def rows_of(release):
    spec = release_spec(release)
    return canary_rows(release=release, spec=spec, step=step_of(release), now=database_now())


def metric(name, source, *, key="", role="guardrail", direction="lower", margin=0.05):
    return {"name": name, "source": source, "key": key, "role": role, "direction": direction, "margin": margin}


def say(world, generation, value, *, signal="thumbs", sender="k", actor="", after_s=1.0, source=None, state="joined"):
    """One event of feedback, as the receiver stores it."""
    at = generation.created_at + timedelta(seconds=after_s)
    row = Feedback.objects.create(
        project=world.project,
        sender=sender,
        source=source,
        signal=SignalDefinition.objects.get(project=world.project, slug=signal),
        state=state,
        target_kind="generation",
        target_id=str(generation.id),
        generation_id=generation.id,
        value=value,
        occurred_at=at,
        actor_hash=actor,
        consent="train",
    )
    Feedback.objects.filter(id=row.id).update(created_at=at)
    return Feedback.objects.get(id=row.id)


def asked(users, key, **changes):
    generation = users.ask(key, **changes)
    return Generation.objects.get(id=generation.id)


METRICS = [
    GOAL,
    metric("thumbs", "signal", key="thumbs", direction="higher"),
    metric("latency", "latency", margin=50.0),
    metric("failures", "failure"),
    metric("refusals", "refusal"),
    metric("responses", "response_rate", direction="higher"),
    metric("length", "behaviour", key="tokens", margin=5.0),
    metric("questions", "behaviour", key="question"),
]


def test_every_source_by_value():
    assert {one["source"] for one in METRICS} == set(MetricSource)
    world = shipping_world(canary=canary_spec(metrics=METRICS))
    release = to_canary(world)
    users = Users(world)
    first = asked(users, "ann", latency_ms=10.0, text="I'm sorry, but I can't help with that.")
    asked(users, "ann", latency_ms=30.0, text="Which one do you mean?")
    asked(users, "ann", outcome=GenerationOutcome.FAILED, latency_ms=5.0)
    asked(users, "ann", outcome=GenerationOutcome.CANCELLED, latency_ms=7.0, text="An ans")
    asked(users, "", text="outside the experiment")
    say(world, first, True)
    found = {
        name: {(row.stratum, row.user): (row.total, row.count) for row in rows}
        for name, rows in rows_of(release).metrics.items()
    }
    ann = (0, first.user_hash)
    assert found["reward"] == {ann: (1.0, 1)}
    assert found["thumbs"] == {ann: (1.0, 1)}
    assert found["latency"] == {ann: (40.0, 2)}
    assert found["failures"] == {ann: (1.0, 3)}  # whoever left is no failure, and no success
    assert found["refusals"] == {ann: (1.0, 3)}
    assert found["questions"] == {ann: (1.0, 3)}
    assert found["responses"] == {ann: (1.0, 2)}
    assert found["length"] == {ann: (9.0, 3)}


def test_arms_steps_and_users_are_told_apart_and_counted_once():
    world = shipping_world()
    release = to_canary(world)
    users = Users(world)
    for number in range(60):
        for _ in range(2):
            users.ask(f"u{number}")
    rows = rows_of(release)
    counted = {arm.value: sum(row.arm == arm for row in rows.metrics["failures"]) for arm in Arm}
    assert counted["canary"] + counted["promoted"] == 60
    assert 0 < counted["canary"] < 30
    assert rows.exposures == [(0, 0.2, counted["promoted"], counted["canary"])]
    assert rows.matured == {Arm.PROMOTED: counted["promoted"], Arm.CANARY: counted["canary"]}
    versions = set(release.generations.values_list("arm", "version"))
    assert versions == {("promoted", release.incumbent_id), ("canary", release.version_id)}


def test_only_answers_past_their_horizon_count_for_feedback_and_all_for_what_is_known_at_once():
    world = shipping_world(horizon_s=600.0)
    release = to_canary(world)
    users = Users(world)
    old, new = asked(users, "ann"), asked(users, "ann")
    Generation.objects.filter(id=old.id).update(created_at=database_now() - timedelta(seconds=601))
    say(world, old, True)
    say(world, new, False)
    say(world, old, False, sender="late", state="late")
    rows = rows_of(release)
    assert [(row.total, row.count) for row in rows.metrics["reward"]] == [(1.0, 1)]
    assert [(row.total, row.count) for row in rows.metrics["failures"]] == [(0.0, 2)]
    assert sum(rows.matured.values()) == 1


def test_one_query_a_metric():
    world = shipping_world(canary=canary_spec(metrics=METRICS))
    release = to_canary(world)
    Users(world).ask("ann")
    spec, step = release_spec(release), step_of(release)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        canary_rows(release=release, spec=spec, step=step, now=database_now())
    asked_of_rows = [query for query in queries.captured_queries if "controlplane_generation" in query["sql"]]
    assert len(asked_of_rows) == len(METRICS) + 2  # and exposures, and who has matured


MAP = {
    "signals": {
        "thumbs": {"values": {"true": 1.0, "false": -1.0}, "weight": 2.0},
        "stars": {"low": -1.0, "high": 1.0, "half_life_s": 100.0},
        "kind": {"values": {"good": 0.5, "bad": -0.5}, "weight": 0.5, "delay_s": 30.0, "horizon_s": 300.0},
    },
    "horizon_s": 400.0,
}


@pytest.mark.parametrize("silence", [{}, {"silence": "value", "silence_value": -0.25}])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_query_says_what_reward_of_says(seed, silence):
    rng = random.Random(seed)
    world = shipping_world()
    signal_define(project=world.project, slug="stars", value_type=SignalType.NUMBER, minimum=1, maximum=5)
    signal_define(
        project=world.project, slug="kind", value_type=SignalType.CATEGORY, categories=["good", "bad", "other"]
    )
    signal_define(project=world.project, slug="ignored", value_type=SignalType.BOOLEAN)
    signal_map_publish(project=world.project, content={**MAP, **silence}, author=None, actor=ACTOR)
    release = to_canary(world)
    users = Users(world)
    sources = [
        FeedbackSource.objects.create(project=world.project, slug=f"s{seed}{n}{uuid.uuid4().hex[:6]}", trust_weight=w)
        for n, w in enumerate((1.0, 0.25))
    ]
    values = {
        "thumbs": lambda: rng.random() < 0.5,
        "stars": lambda: rng.choice([1, 2.5, 3, 4, 5]),
        "kind": lambda: rng.choice(["good", "bad", "other"]),
        "ignored": lambda: True,
    }
    said = defaultdict(list)
    generations = []
    for number in range(25):
        generation = asked(users, f"u{number % 9}")
        Generation.objects.filter(id=generation.id).update(created_at=database_now() - timedelta(seconds=500 + number))
        generation = Generation.objects.get(id=generation.id)
        generations.append(generation)
        for _ in range(rng.randrange(6)):
            signal, source = rng.choice(list(values)), rng.choice([*sources, None])
            event = say(
                world,
                generation,
                values[signal](),
                signal=signal,
                sender=source.slug if source else "key:1",
                source=source,
                actor=rng.choice(["", "a", "b"]),
                after_s=rng.choice([-5.0, 1.0, 20.0, 45.0, 250.0, 350.0]),
            )
            said[generation.id].append(event)
    content = signal_map_current(project=world.project)
    wanted = defaultdict(list)
    for generation in generations:
        reward = reward_of(content, said[generation.id], generation_at=generation.created_at)
        if reward is not None:
            wanted[generation.arm, generation.user_hash].append(reward)
    found = {(row.arm, row.user): (row.total, row.count) for row in rows_of(release).metrics["reward"]}
    assert found.keys() == wanted.keys()
    for key, rewards in wanted.items():
        assert found[key] == (pytest.approx(sum(rewards)), len(rewards)), key
    assert len(wanted) >= 5
