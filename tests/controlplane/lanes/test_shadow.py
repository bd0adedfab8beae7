"""The shadow: which prompts are replayed, what the comparison says, and how a release goes on from it."""

from __future__ import annotations

import random

import pytest

from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import StaleFence
from controlplane.models import Generation, Release, WorkUnit
from controlplane.services.canaries import release_step_on
from controlplane.services.releases import release_end, release_pause
from controlplane.services.shadows import Replay, shadow_compare, shadow_plan, shadow_record
from controlplane.services.work import work_claim
from controlplane.states import ReleaseState, WorkKind, WorkState
from rl_core.store import open_store
from tests.lane_rows import ACTOR
from tests.shipping_rig import assert_sound, evaluate, propose, shipping_world, transfers_arrive

pytestmark = pytest.mark.django_db

CALM = {"tokens": 30, "refusal": False, "question": False, "invalid_tool_calls": 0}


def replays(count: int, *, refusing: float = 0.0, before: float = 0.0, tokens: int = 30, seed: int = 1) -> list[Replay]:
    rng = random.Random(seed)
    return [
        Replay(
            candidate={**CALM, "refusal": rng.random() < refusing, "tokens": tokens + rng.randrange(5)},
            incumbent={**CALM, "refusal": rng.random() < before, "tokens": 30 + rng.randrange(5)},
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (replays(60), "pass"),
        (replays(60, before=0.5), "pass"),  # refuses less
        (replays(60, refusing=0.6), "fail"),
        (replays(12, refusing=0.2, seed=3), "undecided"),  # seems to, on too few
        (replays(20), "undecided"),  # a third of the prompts answered
        ([], "undecided"),
        (replays(60, tokens=32), "pass"),
        (replays(60, tokens=60), "fail"),
        (replays(60, tokens=8), "fail"),
    ],
)
def test_the_comparison(found, verdict):
    result = shadow_compare(found, asked=60 if len(found) != 12 else 12, margin=0.1)
    assert result["verdict"] == verdict, result


def test_grades_are_compared_where_both_could_be_given():
    worse = [Replay(CALM, CALM, candidate_grade=0.3, incumbent_grade=0.9) for _ in range(10)]
    assert shadow_compare(worse, asked=10, margin=0.1)["verdict"] == "fail"
    ungraded = [Replay(CALM, CALM, candidate_grade=None, incumbent_grade=0.9) for _ in range(10)]
    result = shadow_compare(ungraded, asked=10, margin=0.1)
    assert (result["verdict"], "rubric" in result["effects"]) == ("pass", False)


@pytest.fixture
def world(tmp_path):
    made = shipping_world(shadow={"prompts": 4, "max_tokens": 16})
    store = open_store(str(tmp_path))
    for number in range(6):
        content = f"question {number % 5}"
        made.generate(store, content=content, user_key=f"u{number}")
    made.generate(store, consent="none")
    return made


def in_shadow(world) -> Release:
    release = propose(world)
    advance_lanes()
    transfers_arrive(world)
    evaluate(release)
    advance_lanes()
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert release.state == ReleaseState.SHADOW
    return release


def claim_of(release: Release):
    unit = WorkUnit.objects.get(kind=WorkKind.SHADOW, ref=release.pk)
    return work_claim(unit_id=unit.pk, worker="test")


def test_consented_prompts_of_the_incumbent_are_replayed_each_once(world):
    Generation.objects.filter(lane=world.lane).update(prompt_hash="")
    rows = list(Generation.objects.filter(lane=world.lane, consent="train").order_by("created_at"))
    for number, row in enumerate(rows):
        Generation.objects.filter(id=row.id).update(prompt_hash=f"p{number % 5}")
    plan = shadow_plan(claim_of(in_shadow(world)))
    assert plan is not None
    assert len(plan.prompts) == 4
    assert len({row.prompt_hash for row in plan.prompts}) == 4
    assert all(row.consent == "train" and row.content_key for row in plan.prompts)
    assert plan.max_tokens == 16


@pytest.mark.parametrize(
    ("found", "state", "word"),
    [
        (replays(40), ReleaseState.CANARY, ""),
        (replays(40, refusing=0.8), ReleaseState.FAILED, "refusal"),
        ([], ReleaseState.SKIPPED, "no data, no pass"),
    ],
)
def test_how_a_release_goes_on(world, found, state, word):
    release = in_shadow(world)
    shadow_record(claim_of(release), asked=40, replays=found)
    assert WorkUnit.objects.get(ref=release.pk).state == WorkState.DONE
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert release.state == state
    assert word in release.outcome
    assert_sound(world.lane)


def test_a_replay_that_dies_is_no_data(world):
    release = in_shadow(world)
    WorkUnit.objects.filter(ref=release.pk).update(state=WorkState.DEAD, error="no replica")
    advance_lanes()
    release = Release.objects.get(pk=release.pk)
    assert (release.state, release.outcome) == (ReleaseState.SKIPPED, "shadow: its replay died: no replica")


def test_a_shadow_that_is_no_longer_wanted_is_not_worked_on(world):
    release = in_shadow(world)
    claim = claim_of(release)
    release_end(release=release, actor=ACTOR, reason="enough")
    with pytest.raises(StaleFence):
        shadow_record(claim, asked=4, replays=replays(4))
    assert WorkUnit.objects.get(ref=release.pk).state == WorkState.CANCELLED


def test_paused_in_its_shadow_the_replay_is_kept_and_the_release_stands(world):
    release = in_shadow(world)
    claim = claim_of(release)
    release_pause(release=release, actor=ACTOR, reason="wait")
    assert shadow_plan(claim) is not None
    shadow_record(claim, asked=4, replays=replays(4))
    advance_lanes()
    assert Release.objects.get(pk=release.pk).state == ReleaseState.PAUSED


def test_a_person_may_go_on_without_the_shadow_and_that_is_written_down(world):
    release = in_shadow(world)
    release_step_on(release=release, actor=ACTOR, reason="the prompts are old")
    release = Release.objects.get(pk=release.pk)
    assert (release.state, release.shadow["verdict"]) == (ReleaseState.CANARY, "waived")
    assert WorkUnit.objects.get(ref=release.pk).state == WorkState.CANCELLED
