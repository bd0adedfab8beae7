"""Every act on a release in every state: what is legal happens once and leaves the lane sound, all else is refused."""

from __future__ import annotations

from itertools import product

import pytest
from django.db import transaction

from controlplane.conductor.shipping import advance_lanes, look_at_canaries
from controlplane.errors import Conflict, Forbidden, Invalid, StaleRevision
from controlplane.models import Event, Lane, PolicyVersion, Release, ReplicaSlot
from controlplane.services.canaries import release_step_on
from controlplane.services.promotions import release_promote, release_rollback
from controlplane.services.releases import (
    IN_FLIGHT,
    release_approve,
    release_end,
    release_pause,
    release_propose,
    release_resume,
)
from controlplane.states import TRANSITIONS, EventType, ReleaseState
from tests.lane_rows import ACTOR, candidate_version, person
from tests.shipping_rig import assert_sound, propose, put_in, shipping_world, transfers_arrive

pytestmark = pytest.mark.django_db

S = ReleaseState
STATES = [(state, "") for state in S if state != S.PAUSED]
STATES += [(S.PAUSED, state) for state in (S.PENDING, S.GATING, S.SHADOW, S.CANARY)]

VERBS = {
    "pause": release_pause,
    "resume": release_resume,
    "abort": release_end,
    "advance": release_step_on,
    "promote": release_promote,
    "rollback": release_rollback,
}
FLYING = [(state, frm) for state, frm in STATES if state in IN_FLIGHT]
# What each act comes to, by the state it finds. What is missing is refused.
LEADS_TO: dict[tuple[str, str, str], ReleaseState] = {
    **{("pause", state, ""): S.PAUSED for state in (S.PENDING, S.GATING, S.SHADOW, S.CANARY)},
    **{("resume", S.PAUSED, frm): S(frm) for _, frm in FLYING if frm},
    **{("abort", state, frm): S.SKIPPED for state, frm in FLYING},
    ("advance", S.SHADOW, ""): S.CANARY,
    ("advance", S.CANARY, ""): S.CANARY,
    ("rollback", S.CANARY, ""): S.ROLLED_BACK,
    ("rollback", S.PAUSED, S.CANARY): S.ROLLED_BACK,
    ("rollback", S.PROMOTED, ""): S.ROLLED_BACK,
}


@pytest.fixture
def release():
    """A release whose candidate is resident, in a lane that has a cadence."""
    world = shipping_world(approvals=0)
    made = propose(world)
    ReplicaSlot.objects.filter(replica=world.replica, slot="candidate").update(
        desired_version=made.version, desired_source="candidate", current_version=made.version
    )
    return made


def test_every_verb_in_every_state(release):
    for (state, paused_from), (verb, act) in product(STATES, VERBS.items()):
        saved = transaction.savepoint()
        row = put_in(release, state, paused_from)
        wanted = LEADS_TO.get((verb, state, paused_from))
        if wanted is None:
            with pytest.raises((Conflict, Invalid)):
                act(release=row, actor=ACTOR, reason="because")
            assert Release.objects.get(pk=row.pk).revision == row.revision, (verb, state, paused_from)
        else:
            act(release=row, actor=ACTOR, reason="because")
            after = Release.objects.get(pk=row.pk)
            assert (after.state, after.revision > row.revision) == (wanted, True), (verb, state, paused_from)
            assert after.state in TRANSITIONS[S][state] | {state}
            last = Event.objects.filter(type=EventType.RELEASE_CHANGED).order_by("-id").first()
            assert (last.reason.endswith("because"), last.actor) == (True, ACTOR.name)
        assert_sound(row.lane)
        transaction.savepoint_rollback(saved)


def test_every_verb_with_a_stale_revision_is_a_412_whatever_the_state(release):
    for (state, paused_from), (verb, act) in product(STATES, VERBS.items()):
        saved = transaction.savepoint()
        row = put_in(release, state, paused_from)
        with pytest.raises(StaleRevision) as refused:
            act(release=row, actor=ACTOR, reason="because", expected_revision=row.revision + 1)
        assert refused.value.http_status == 412, (verb, state)
        assert Release.objects.get(pk=row.pk).state == state
        transaction.savepoint_rollback(saved)


def test_no_act_without_a_reason(release):
    for act in (release_pause, release_resume, release_end, release_step_on, release_rollback):
        with pytest.raises(Invalid):
            act(release=release, actor=ACTOR, reason="  ")
    with pytest.raises(Invalid):
        release_approve(release=release, user=person("bob"), actor=ACTOR, reason="")


def test_the_conductor_leaves_every_state_sound_and_moves_only_as_the_table_says(release):
    for state, paused_from in STATES:
        saved = transaction.savepoint()
        row = put_in(release, state, paused_from)
        advance_lanes()
        look_at_canaries()
        after = Release.objects.get(pk=row.pk)
        assert after.state == state or after.state in TRANSITIONS[S][state], (state, after.state)
        assert_sound(row.lane)
        transaction.savepoint_rollback(saved)


def test_who_proposes_does_not_approve(release):
    with pytest.raises(Forbidden) as refused:
        release_approve(release=release, user=release.proposer, actor=ACTOR, reason="mine")
    assert refused.value.http_status == 403


def test_approvals_are_of_others_than_the_proposer_and_counted_once_a_person(release):
    Lane.objects.filter(pk=release.lane_id).update(approvals=2)
    row = put_in(release, S.CANARY)
    row.steps.update(position=1, verdict="pass")
    bob = person("bob")
    for _ in range(2):
        release_approve(release=row, user=bob, actor=ACTOR, reason="fine")
    with pytest.raises(Conflict, match="2 approval"):
        release_promote(release=row, actor=ACTOR, reason="go")
    release_approve(release=row, user=person("cyd"), actor=ACTOR, reason="fine")
    assert release_promote(release=row, actor=ACTOR, reason="go").state == S.PROMOTED
    assert_sound(row.lane)


@pytest.mark.parametrize("verdict", ["", "undecided", "fail"])
def test_no_promotion_without_a_canary_that_passed_at_its_last_step(release, verdict):
    row = put_in(release, S.CANARY)
    row.steps.update(position=1, verdict=verdict)
    with pytest.raises(Conflict, match="last step"):
        release_promote(release=row, actor=ACTOR, reason="go")
    row.steps.update(position=0, verdict="pass")  # an earlier step's pass is none of the last one's
    with pytest.raises(Conflict, match="last step"):
        release_promote(release=row, actor=ACTOR, reason="go")


def test_no_step_and_no_promotion_in_a_hold_or_a_freeze_but_the_way_back_is_open(release):
    row = put_in(release, S.CANARY)
    Lane.objects.filter(pk=row.lane_id).update(hold_reason="an alert")
    for act in (release_step_on, release_promote):
        with pytest.raises(Conflict):
            act(release=row, actor=ACTOR, reason="go")
    Lane.objects.filter(pk=row.lane_id).update(hold_reason="")
    spec = {
        **row.spec,
        "freezes": [
            {"kind": "weekly", "days": [0, 1, 2, 3, 4, 5], "start": "00:00", "end": "24:00"},
            {"kind": "weekly", "days": [6], "start": "00:00", "end": "23:59"},
        ],
    }
    Release.objects.filter(pk=row.pk).update(spec=spec)
    with pytest.raises(Conflict, match="frozen until"):
        release_step_on(release=Release.objects.get(pk=row.pk), actor=ACTOR, reason="go")
    assert release_rollback(release=row, actor=ACTOR, reason="bad").state == S.ROLLED_BACK


def test_a_newer_candidate_supersedes_one_that_no_user_has_met(release):
    newer = candidate_version_of(release)
    with pytest.raises(Conflict, match="in flight"):
        release_propose(lane=release.lane, version=newer, run=None, proposer=None, actor=ACTOR, reason="newer")
    made = release_propose(
        lane=release.lane, version=newer, run=None, proposer=None, actor=ACTOR, reason="newer", supersede=True
    )
    older = Release.objects.get(pk=release.pk)
    assert (older.state, older.outcome) == (S.SKIPPED, f"superseded by version {newer}")
    put_in(made, S.CANARY)
    with pytest.raises(Conflict, match="in flight"):
        release_propose(
            lane=release.lane,
            version=candidate_version_of(release, root="e" * 64),
            run=None,
            proposer=None,
            actor=ACTOR,
            reason="newest",
            supersede=True,
        )


def candidate_version_of(release: Release, root: str = "d" * 64) -> PolicyVersion:
    """Another candidate of the release's lane."""

    class World:
        project = release.lane.project
        model = release.lane.model

    return candidate_version(World, root=root)  # type: ignore[arg-type]


def test_an_ended_release_leaves_no_slot_that_wishes_for_its_candidate(release):
    row = put_in(release, S.CANARY)
    release_end(release=row, actor=ACTOR, reason="enough")
    slots = ReplicaSlot.objects.filter(replica__cluster=row.lane.cluster_id)
    assert not slots.filter(desired_version=row.version).exists()
    assert slots.filter(current_version=row.version).exists()  # it stays where it is until the place is needed


def test_a_promotion_against_another_incumbent_is_refused(release):
    row = put_in(release, S.CANARY)
    row.steps.update(position=1, verdict="pass")
    other = candidate_version_of(release)
    Lane.objects.filter(pk=row.lane_id).update(promoted_version=other)
    with pytest.raises(Conflict, match="another version"):
        release_promote(release=row, actor=ACTOR, reason="go")


def test_the_gate_ends_what_fails_and_what_shows_nothing():
    from tests.shipping_rig import evaluate

    for candidate, tasks, state in ((0.1, 3, S.FAILED), (0.5, 1, S.SKIPPED)):
        world = shipping_world()
        made = propose(world)
        advance_lanes()
        transfers_arrive(world)
        evaluate(made, candidate=candidate, incumbent=0.5, tasks=tasks)
        advance_lanes()
        after = Release.objects.get(pk=made.pk)
        assert after.state == state
        assert after.outcome.startswith("gate")
        assert_sound(world.lane)
