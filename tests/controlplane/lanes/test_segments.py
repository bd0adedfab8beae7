"""Who answers is not random: a candidate that silences one segment seems better, until answers are weighed."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from controlplane.models import Generation
from controlplane.selectors.lane_routes import lane_route
from controlplane.services.canaries import canary_look
from controlplane.services.clock import database_now
from controlplane.services.signals import signal_map_publish
from controlplane.services.window_candidates import window_read
from controlplane.services.windows import signal_map_current
from controlplane.states import Arm
from rl_core.specs import BaselineSpec, RealtimeStage, StratumKey, WindowSpec
from rl_core.store import open_store
from tests.controlplane.lanes.test_canary_outcomes import asked, metric, rows_of, say
from tests.lane_rows import ACTOR, lane_world
from tests.shipping_crowd import Asked, crowd
from tests.shipping_rig import GOAL, Users, canary_spec, shipping_world, to_canary

pytestmark = pytest.mark.django_db

RULES = {"signals": {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}}
# By arm and segment, of 40 users each: how many answer, and how many of those are content. The strict are content by
# 30 %, the easy by 70 %, with either version; but the candidate silences half of the strict who would have answered.
ANSWERS = {
    (Arm.PROMOTED, "strict"): (20, 6),
    (Arm.PROMOTED, "easy"): (20, 14),
    (Arm.CANARY, "strict"): (10, 3),
    (Arm.CANARY, "easy"): (20, 14),
}
USERS = 40


def silenced(*, named: bool = True, **content):
    """A canary of half of the users, of whom some answer; and its release."""
    metrics = [GOAL, metric("thumbs", "signal", key="thumbs"), metric("responses", "response_rate")]
    world = shipping_world(canary=canary_spec(steps=[0.5], metrics=metrics))
    signal_map_publish(project=world.project, content={**RULES, **content}, author=None, actor=ACTOR)
    release = to_canary(world)
    route = lane_route(project_id=world.project.pk, slug=world.lane.slug)
    met, requests = Counter(), []
    while len(requests) < USERS * len(ANSWERS):
        user = f"user-{sum(met.values())}"
        arm = route.assign(user)[1].arm
        place = met[arm]
        met[arm] += 1
        if place < 2 * USERS:
            segment = ("strict", "easy")[place % 2]
            answering, content_ones = ANSWERS[arm, segment]
            likes = place // 2 < content_ones if place // 2 < answering else None
            requests.append(Asked(user=user, likes=likes, segment=segment if named else ""))
    crowd(world, requests)
    return release


def test_without_segments_the_silence_of_the_strict_looks_like_a_gain():
    found = canary_look(silenced(named=False)).found.effects
    assert found["reward"].difference == pytest.approx(17 / 30 - 20 / 40)
    assert found["thumbs"].difference == pytest.approx(17 / 30 - 20 / 40)


def test_weighed_by_segment_the_gain_is_gone():
    found = canary_look(silenced()).found.effects
    for name in ("reward", "thumbs"):
        assert (found[name].mean_promoted, found[name].mean_canary) == (pytest.approx(0.5), pytest.approx(0.5))
        assert found[name].difference == pytest.approx(0.0, abs=1e-12)
        assert (found[name].n_promoted, found[name].n_canary) == (40, 30)
    assert found["responses"].difference == pytest.approx(30 / 80 - 40 / 80)  # a guardrail by itself, not weighed


def test_a_map_that_does_not_weigh_is_followed():
    rows = rows_of(silenced(weigh_responses=False)).metrics["reward"]
    assert {row.weight for row in rows} == {1.0}


def test_silence_that_has_a_value_leaves_nothing_to_weigh():
    rows = rows_of(silenced(silence="value", silence_value=0.0)).metrics
    assert {row.weight for row in rows["reward"]} == {1.0}
    assert {row.weight for row in rows["thumbs"]} == {2.0, 4.0}
    assert len(rows["reward"]) == 160


def test_a_user_is_of_the_segment_that_their_first_request_named():
    world = shipping_world()
    release = to_canary(world)
    users = Users(world)
    first, second = (asked(users, "ann", segment=segment) for segment in ("free", "paying"))
    Generation.objects.filter(id=first.id).update(created_at=database_now() - timedelta(seconds=60))
    for number in range(40):  # others of the free segment, on both arms, who say nothing
        users.ask(f"user-{number}", segment="free")
    say(world, second, True)
    free = release.generations.filter(segment="free", arm=second.arm).count()  # with her own
    (row,) = rows_of(release).metrics["reward"]
    assert (row.user, row.weight) == (second.user_hash, free)
    assert free > 1


def test_a_window_can_weigh_and_compare_by_segment():
    world, store = lane_world(), open_store("memory:///")
    for user, segment in (("ann", "free"), ("bob", "paying"), ("eve", "")):
        world.generate(store, user_key=user, segment=segment)
    stage = RealtimeStage(
        lane=world.lane.slug,
        window=WindowSpec(weigh_by=StratumKey.SEGMENT),
        baseline=BaselineSpec(stratum=StratumKey.SEGMENT),
    )
    read = window_read(lane=world.lane, stage=stage, content=signal_map_current(project=world.project), until=None)
    assert {(one.weigh_by, one.stratum) for one in read.candidates} == {
        ("free", "free"),
        ("paying", "paying"),
        ("", ""),
    }
