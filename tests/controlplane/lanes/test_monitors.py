"""Monitors: behaviour that moved, gates that promise what users do not feel, feedback that goes astray."""

from __future__ import annotations

import random

import pytest

from controlplane.conductor.shipping import watch_lanes
from controlplane.models import Alert, Feedback, Generation, Release, SignalDefinition
from controlplane.services.alerts import alert_resolve
from controlplane.services.monitors import lane_watch, project_watch
from controlplane.states import FeedbackState, ReleaseState
from rl_core.store import open_store
from tests.controlplane.lanes.test_canary_outcomes import say
from tests.lane_rows import ACTOR, person
from tests.shipping_rig import Users, lane_of, propose, put_in, shipping_world, to_canary

pytestmark = pytest.mark.django_db

REFUSAL = "I'm sorry, but I can't help with that."
MONITORS = {"behaviours": ["refusal", "question"], "threshold": 0.1, "minimum": 50, "divergence": 0.15}


def answers(world, version, count, *, refusals=0.0, text="A short answer.", likes=None, seed=0) -> None:
    """So many users are answered by a version; an even share of them is refused, a random one content."""
    store, rng = open_store("memory:///"), random.Random(seed)
    for number in range(count):
        refused = (number * refusals) % 1 + refusals > 1 - 1e-9 if refusals else False
        generation = world.generate(
            store,
            version=version,
            user_key=f"user-{number}",
            text=REFUSAL if refused else text,
            consent="none",
        )
        if likes is not None:
            say(world, Generation.objects.get(id=generation.id), rng.random() < likes, sender=str(number))


def promoted(world, *, difference=0.1) -> Release:
    release = put_in(propose(world), ReleaseState.PROMOTED)
    Release.objects.filter(pk=release.pk).update(gate={"verdict": "pass", "difference": difference})
    return release


def test_a_refusal_rate_that_rose_holds_the_lane_and_is_complained_of_once():
    world = shipping_world(monitors=MONITORS)
    release = promoted(world)
    answers(world, release.incumbent, 120)
    answers(world, release.version, 120, refusals=0.4)
    [alert] = lane_watch(lane_of(world))
    assert (alert.kind, alert.holds, alert.detail["behaviour"]) == ("behaviour", True, "refusal")
    assert alert.detail["now"] == pytest.approx(0.4, abs=0.02)
    assert lane_of(world).hold_reason.startswith("behaviour alert on refusal")
    assert lane_watch(lane_of(world)) == []
    alert_resolve(alert=alert, user=person("ann"), actor=ACTOR, reason="a safety rule was added")
    assert lane_watch(lane_of(world)) == []  # a person has judged this version
    assert lane_of(world).hold_reason == ""


@pytest.mark.parametrize(
    ("count", "refusals"),
    [(120, 0.0), (120, 0.05), (40, 0.9)],  # nothing moved; it moved by less than the threshold; too few answers
)
def test_what_has_not_moved_far_or_is_not_known_yet_calls_nobody(count, refusals):
    world = shipping_world(monitors=MONITORS)
    release = promoted(world)
    answers(world, release.incumbent, 120)
    answers(world, release.version, count, refusals=refusals)
    assert lane_watch(lane_of(world)) == []


def test_without_hold_the_lane_goes_on():
    world = shipping_world(monitors={**MONITORS, "hold": False})
    release = promoted(world)
    answers(world, release.incumbent, 120)
    answers(world, release.version, 120, refusals=0.5)
    [alert] = lane_watch(lane_of(world))
    assert not alert.holds
    assert lane_of(world).hold_reason == ""


def test_answers_that_grow_many_times_longer_are_seen():
    world = shipping_world(monitors=MONITORS)
    release = promoted(world)
    answers(world, release.incumbent, 60)
    answers(world, release.version, 60)
    for arm, tokens in ((release.incumbent, 20), (release.version, 80)):
        for row in world.lane.generations.filter(version=arm):
            behaviour = {**row.behaviour, "tokens": tokens + row.id.int % 5}
            world.lane.generations.filter(id=row.id).update(behaviour=behaviour)
    [alert] = lane_watch(lane_of(world))
    assert alert.detail["behaviour"] == "tokens"


def test_a_candidate_in_its_canary_is_watched_against_its_incumbent():
    world = shipping_world(monitors=MONITORS)
    release = to_canary(world)
    users = Users(world)
    for number in range(500):
        generation = users.ask(f"u{number}")
        if generation.arm == "canary" and number % 2:
            generation.behaviour["refusal"] = True
            world.lane.generations.filter(id=generation.id).update(behaviour=generation.behaviour)
    watch_lanes()
    alert = Alert.objects.get(lane=world.lane)
    assert alert.subject == f"{release.version_id}:refusal"


def test_a_drift_too_small_for_one_promotion_is_seen_over_several():
    world = shipping_world(monitors=MONITORS)
    first = promoted(world)
    answers(world, first.incumbent, 200)
    for number, release in enumerate([first, promoted(world), promoted(world)], start=1):
        answers(world, release.version, 200, refusals=0.07 * number)
    found = lane_watch(lane_of(world))
    assert {alert.detail["behaviour"] for alert in found} == {"refusal"}
    assert found[0].detail["baseline"] != str(lane_of(world).releases.order_by("-promoted_at")[0].incumbent.ref)


def test_gates_that_rise_while_users_feel_nothing_are_seen():
    world = shipping_world(monitors=MONITORS)
    first = promoted(world, difference=0.2)
    second = promoted(world, difference=0.25)
    for seed, version in enumerate((first.incumbent, first.version, second.version)):
        answers(world, version, 150, likes=0.5, seed=seed)
    [alert] = lane_watch(lane_of(world))
    assert alert.kind == "divergence"
    assert alert.detail["promotions"] == 2
    assert alert.detail["proxy"] == pytest.approx(0.45)


def test_gates_that_rise_with_what_users_feel_are_believed():
    world = shipping_world(monitors=MONITORS)
    release = promoted(world, difference=0.3)
    answers(world, release.incumbent, 150, likes=0.4, seed=1)
    answers(world, release.version, 150, likes=0.75, seed=2)
    assert lane_watch(lane_of(world)) == []


def test_feedback_that_finds_no_generations_calls_a_person_of_the_project():
    world = shipping_world()
    signal = SignalDefinition.objects.get(project=world.project, slug="thumbs")
    states = [FeedbackState.ORPHANED] * 8 + [FeedbackState.JOINED] * 52
    for state in states:
        Feedback.objects.create(
            project=world.project,
            sender="k",
            signal=signal,
            state=state,
            target_kind="generation",
            target_id="x",
            value=True,
            occurred_at="2026-01-01T00:00:00Z",
        )
    alert = project_watch(world.project)
    assert alert is not None
    assert (alert.kind, alert.lane, alert.holds) == ("orphans", None, False)
    assert project_watch(world.project) is None
    assert project_watch(shipping_world().project) is None
