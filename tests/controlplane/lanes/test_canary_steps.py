"""A canary through the conductor: steps, holds, the pass at the last step, harm, and a pause that keeps the arms."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import Conflict
from controlplane.models import Alert, CanaryStep, Event, Feedback, Lane, Release, ServedVersion
from controlplane.selectors.canary_outcomes import CanaryRows
from controlplane.selectors.lane_routes import lane_route
from controlplane.services.canaries import Look, canary_conclude, canary_look, finite, release_step_on
from controlplane.services.clock import database_now
from controlplane.services.lanes import lane_served_at
from controlplane.services.promotions import release_promote
from controlplane.services.releases import release_end, release_pause, release_resume
from controlplane.states import Arm, CanaryVerdict, EventType, FeedbackState, GenerationOutcome, ReleaseState
from rl_core.shipping.canary import CanaryLook, Verdict
from tests.lane_rows import ACTOR
from tests.shipping_crowd import Asked, crowd
from tests.shipping_rig import (
    assert_sound,
    canary_spec,
    evaluate,
    look,
    propose,
    shipping_world,
    step_of,
    to_canary,
)

pytestmark = pytest.mark.django_db


def fresh(release: Release) -> Release:
    return Release.objects.get(pk=release.pk)


def arms_of(world, count: int) -> dict[str, Arm]:
    """The arm of each of so many users, as the gateway assigns them now."""
    route = lane_route(project_id=world.project.pk, slug=world.lane.slug)
    return {user: route.assign(user)[1].arm for user in (f"user-{number}" for number in range(count))}


def fill(world, count: int, *, canary_fails: float = 0.0, canary_likes: float = 0.6, likes: float = 0.6) -> None:
    """So many users ask twice and say what they think; a fixed share of each arm's likes it."""
    arms = arms_of(world, count)
    seen = {Arm.PROMOTED: 0, Arm.CANARY: 0}
    asked = []
    for user, arm in arms.items():
        place, share = seen[arm] * 0.618, canary_likes if arm == Arm.CANARY else likes
        asked += [Asked(user=user, likes=(place + turn * 0.5) % 1 < share) for turn in range(2)]
        if arm == Arm.CANARY and place % 1 < canary_fails:
            asked += [Asked(user=user, outcome=GenerationOutcome.FAILED)] * 2
        seen[arm] += 1
    crowd(world, asked)


def test_the_first_step_has_a_salt_a_share_and_an_arm_that_serves():
    world = shipping_world()
    release = to_canary(world)
    assert (len(release.salt), release.share) == (64, 0.2)
    step = step_of(release)
    assert (step.position, step.share, step.verdict) == (0, 0.2, "")
    assert ServedVersion.objects.get(release=release, arm=Arm.CANARY).until is None
    assert lane_route(project_id=world.project.pk, slug=world.lane.slug).canary.version == release.version
    assert_sound(world.lane)


def test_no_data_no_step_and_no_pass():
    world = shipping_world()
    release = to_canary(world)
    for _ in range(3):
        look()
    step = step_of(release)
    assert (step.position, step.verdict, step.ended_at) == (0, CanaryVerdict.UNDECIDED, None)
    assert step.analysis["effects"]["reward"]["difference"] is None
    assert fresh(release).state == ReleaseState.CANARY
    assert Event.objects.filter(type=EventType.CANARY_ANALYSED).count() == 1  # looks that say the same say nothing


def test_a_step_is_held_and_needs_users_whose_outcomes_have_matured():
    world = shipping_world(canary=canary_spec(hold_s=3600.0))
    release = to_canary(world)
    fill(world, 80)
    look()
    assert step_of(release).position == 0  # not held long enough
    CanaryStep.objects.filter(release=release).update(created_at=database_now() - timedelta(seconds=3601))
    look()
    release = fresh(release)
    assert (step_of(release).position, release.share) == (1, 0.5)
    first = release.steps.get(position=0)
    assert first.ended_at is not None
    assert_sound(world.lane)
    few = shipping_world(canary=canary_spec(minimum_users=50))
    other = to_canary(few)
    fill(few, 60)
    look()
    assert step_of(other).position == 0  # too few


def test_users_only_ever_move_to_the_canary():
    world = shipping_world()
    release = to_canary(world)
    before = arms_of(world, 80)
    release_step_on(release=release, actor=ACTOR, reason="on")
    after = arms_of(world, 80)
    assert all(after[user] == "canary" for user, arm in before.items() if arm == "canary")
    assert sum(arm == "canary" for arm in after.values()) > sum(arm == "canary" for arm in before.values())


ONE_STEP = {"steps": [0.5], "hold_s": 0.0, "minimum_users": 5}


def test_an_equal_candidate_passes_at_the_last_step_and_waits_for_people():
    world = shipping_world(canary=canary_spec(**ONE_STEP))
    release = to_canary(world)
    with pytest.raises(Conflict, match="last step"):
        release_promote(release=release, actor=ACTOR, reason="go")
    fill(world, 1200)
    look()
    step = step_of(release)
    assert step.verdict == CanaryVerdict.PASS, step.analysis
    assert fresh(release).state == ReleaseState.CANARY
    with pytest.raises(Conflict, match="approval"):
        release_promote(release=release, actor=ACTOR, reason="go")
    Lane.objects.filter(pk=world.lane.pk).update(approvals=0)
    assert release_promote(release=release, actor=ACTOR, reason="go").state == ReleaseState.PROMOTED
    assert Lane.objects.get(pk=world.lane.pk).promoted_version == release.version
    assert_sound(world.lane)


def test_what_passed_is_promoted_by_itself_where_the_cadence_says_so():
    world = shipping_world(auto_promote=True, canary=canary_spec(**ONE_STEP))
    release = to_canary(world)
    fill(world, 1200)
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="look at this first")
    look()
    assert (step_of(release).verdict, fresh(release).state) == (CanaryVerdict.PASS, ReleaseState.CANARY)
    Lane.objects.filter(pk=world.lane.pk).update(hold_reason="")
    look()
    release = fresh(release)
    assert (release.state, release.outcome) == (
        ReleaseState.PROMOTED,
        "passed; the cadence promotes by itself",
    )
    assert_sound(world.lane)


def test_harm_ends_it_at_once_in_one_look_and_calls_a_person():
    world = shipping_world()
    incumbent = world.lane.promoted_version
    release = to_canary(world)
    fill(world, 300, canary_likes=0.05)
    look()
    release = fresh(release)
    assert release.state == ReleaseState.ROLLED_BACK
    assert "reward: worse" in release.outcome
    assert Lane.objects.get(pk=world.lane.pk).promoted_version == incumbent
    release.version.refresh_from_db()
    assert release.version.quarantined_at is not None
    of_candidate = Feedback.objects.filter(generation_id__in=release.generations.filter(arm="canary").values("id"))
    assert set(of_candidate.values_list("state", flat=True)) == {FeedbackState.QUARANTINED}
    of_incumbent = Feedback.objects.filter(generation_id__in=release.generations.filter(arm="promoted").values("id"))
    assert set(of_incumbent.values_list("state", flat=True)) == {FeedbackState.JOINED}
    alert = Alert.objects.get(lane=world.lane)
    assert (alert.kind, alert.holds) == ("guardrail", False)
    assert "reward: worse" in alert.detail["reason"]
    route = lane_route(project_id=world.project.pk, slug=world.lane.slug)
    assert (route.canary, route.promoted.version) == (None, incumbent)
    assert_sound(world.lane)


def test_a_guardrail_ends_it_though_the_goal_is_better():
    world = shipping_world()
    release = to_canary(world)
    fill(world, 300, canary_likes=0.95, canary_fails=0.6)
    look()
    assert fresh(release).state == ReleaseState.ROLLED_BACK
    assert "failures: worse" in fresh(release).outcome


def test_arms_of_the_wrong_size_end_it_and_hold_the_lane():
    world = shipping_world(canary=canary_spec(steps=[0.5]))
    release = to_canary(world)
    arms = arms_of(world, 400)
    kept = [user for place, (user, arm) in enumerate(arms.items()) if arm == Arm.PROMOTED or place % 3 == 0]
    crowd(world, [Asked(user=user) for user in kept])  # the canary's others are lost before they are recorded
    look()
    assert fresh(release).state == ReleaseState.ROLLED_BACK
    alert = Alert.objects.get(lane=world.lane)
    assert (alert.kind, alert.holds) == ("sample_ratio", True)
    assert Lane.objects.get(pk=world.lane.pk).hold_reason.startswith("sample_ratio")


def test_a_pause_keeps_the_arms_and_harm_still_ends_it():
    world = shipping_world()
    release = to_canary(world)
    release_pause(release=release, actor=ACTOR, reason="let me look")
    route = lane_route(project_id=world.project.pk, slug=world.lane.slug)
    assert (route.canary.version, route.experiment.share) == (release.version, 0.2)
    fill(world, 80)
    look()
    assert (step_of(release).position, fresh(release).state) == (0, ReleaseState.PAUSED)
    release_resume(release=release, actor=ACTOR, reason="looks right")
    look()
    assert step_of(release).position == 1
    release_pause(release=release, actor=ACTOR, reason="once more")
    fill(world, 400, canary_likes=0.0)
    look()
    assert fresh(release).state == ReleaseState.ROLLED_BACK
    assert_sound(world.lane)


def concluded(release: Release, verdict: Verdict) -> Release:
    found = CanaryLook(verdict=verdict, reasons=["so"], effects={}, enough_users=True, sample_ratio_p=1.0)
    rows = CanaryRows({}, [], {Arm.PROMOTED: 0, Arm.CANARY: 0})
    return canary_conclude(release=fresh(release), look=Look(step_of(release), rows, found))


def test_a_pass_holds_until_harm_is_shown():
    world = shipping_world(canary=canary_spec(**ONE_STEP))
    release = to_canary(world)
    concluded(release, Verdict.PASS)
    concluded(release, Verdict.UNDECIDED)
    assert step_of(release).verdict == CanaryVerdict.PASS
    concluded(release, Verdict.FAIL)
    assert (step_of(release).verdict, fresh(release).state) == (CanaryVerdict.FAIL, ReleaseState.ROLLED_BACK)


def test_a_look_at_a_release_that_moved_meanwhile_is_dropped():
    world = shipping_world()
    release = to_canary(world)
    seen = fresh(release)
    found = canary_look(seen)
    release_end(release=release, actor=ACTOR, reason="enough")
    with pytest.raises(Exception, match="revision"):
        canary_conclude(release=seen, look=found)
    assert CanaryStep.objects.get(release=release).analysis == {}


def test_a_canary_does_not_begin_while_a_replica_lacks_the_candidate():
    world = shipping_world()
    release = propose(world)
    advance_lanes()
    evaluate(release)
    for _ in range(3):
        advance_lanes()
    assert fresh(release).state == ReleaseState.GATING


def test_what_is_kept_of_a_look_is_json():
    assert finite({"a": [math.inf, 1.0], "b": (math.nan,)}) == {"a": [None, 1.0], "b": [None]}


def test_which_version_answered_a_user_at_a_time_canary_included():
    world = shipping_world()
    before = database_now()
    incumbent = world.lane.promoted_version
    release = to_canary(world)
    arms = arms_of(world, 40)
    in_first = database_now()
    release_step_on(release=release, actor=ACTOR, reason="on")
    later = arms_of(world, 40)
    in_second = database_now()
    release_end(release=fresh(release), actor=ACTOR, reason="enough")
    after = database_now()
    lane = world.lane
    for user, arm in arms.items():
        told = [lane_served_at(lane=lane, at=at, user_key=user) for at in (before, in_first, in_second, after)]
        expected = [
            incumbent,
            release.version if arm == "canary" else incumbent,
            release.version if later[user] == "canary" else incumbent,
            incumbent,
        ]
        assert [row.version for row in told] == expected, user
    assert {"canary", "promoted"} == set(arms.values())
    assert lane_served_at(lane=lane, at=in_first).version == incumbent
    assert lane_served_at(lane=lane, at=before - timedelta(days=1)) is None
