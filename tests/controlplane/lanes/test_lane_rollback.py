"""Rolling a lane back: to any good version, at once or as soon as a replica holds it; what was bad is set aside."""

from __future__ import annotations

import pytest

from controlplane.conductor.fleet import slots_reconcile
from controlplane.conductor.lanes import lanes_place
from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import Conflict, Invalid, StaleRevision
from controlplane.models import Lane, PolicyVersion, Release, Replica, ReplicaSlot, ServedVersion
from controlplane.selectors.lane_routes import lane_route
from controlplane.selectors.pages_blast import blast_of_rollback
from controlplane.services.fleet import replica_register, slot_target
from controlplane.services.promotions import lane_rollback, release_rollback
from controlplane.services.releases import release_propose
from controlplane.services.slots import slot_run_now
from controlplane.states import Arm, DesiredSource, ReleaseState, ReplicaState, WeightSlot
from tests.lane_rows import ACTOR, candidate_version
from tests.shipping_rig import assert_sound, lane_of, propose, put_in, shipping_world, transfers_arrive

pytestmark = pytest.mark.django_db


def promoted(world) -> Release:
    """A further version answers; the one before is resident in the other slot."""
    before = Lane.objects.get(pk=world.lane.pk).promoted_version
    release = put_in(propose(world), ReleaseState.PROMOTED)
    slots = list(ReplicaSlot.objects.filter(replica=world.replica).order_by("slot"))
    for slot, version, source in ((slots[0], release.version, "promoted"), (slots[1], before, "candidate")):
        ReplicaSlot.objects.filter(pk=slot.pk).update(
            desired_version=version, current_version=version, desired_source=source
        )
    return release


def test_to_the_version_before_at_once():
    world = shipping_world()
    first = world.lane.promoted_version
    release = promoted(world)
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="complaints")
    assert (lane.promoted_version, lane.rollback_to) == (first, None)
    release = Release.objects.get(pk=release.pk)
    assert (release.state, release.outcome) == (ReleaseState.ROLLED_BACK, "complaints")
    release.version.refresh_from_db()
    assert release.version.quarantined_at is not None
    assert lane_route(project_id=world.project.pk, slug=world.lane.slug).promoted.version == first
    assert_sound(lane)


def test_two_versions_back_waits_for_its_weights_and_then_answers():
    world = shipping_world()
    first = world.lane.promoted_version
    second = promoted(world)
    third = promoted(world)
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="both are bad")
    assert (lane.promoted_version, lane.rollback_to) == (third.version, first)
    wished = ReplicaSlot.objects.get(replica=world.replica, desired_version=first)
    assert wished.current_version == second.version
    advance_lanes()
    assert lane_of(world).promoted_version == third.version  # not there yet
    with pytest.raises(Conflict, match="rolled back"):
        slot_run_now(lane=lane_of(world), actor=ACTOR, reason="now")
    transfers_arrive(world)
    advance_lanes()
    lane = lane_of(world)
    assert (lane.promoted_version, lane.rollback_to, lane.rollback_reason) == (first, None, "")
    assert Release.objects.get(pk=third.pk).outcome == f"{ACTOR.name}: both are bad"
    marked = set(PolicyVersion.objects.filter(quarantined_at__isnull=False).values_list("pk", flat=True))
    assert third.version_id in marked
    assert second.version_id not in marked  # it is not what was complained of
    assert_sound(lane)


def test_a_rollback_that_waits_can_be_called_off():
    world = shipping_world()
    first = world.lane.promoted_version
    promoted(world)
    third = promoted(world)
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    lane = lane_rollback(lane=lane_of(world), version=third.version, actor=ACTOR, reason="a mistake")
    assert (lane.promoted_version, lane.rollback_to) == (third.version, None)
    with pytest.raises(Conflict, match="answers already"):
        lane_rollback(lane=lane, version=third.version, actor=ACTOR, reason="again")


def test_descendants_are_marked_and_cannot_be_proposed():
    world = shipping_world()
    first = world.lane.promoted_version
    release = promoted(world)
    child = propose(world)  # a run from the promoted version
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    ended = Release.objects.get(pk=child.pk)
    assert ended.state == ReleaseState.SKIPPED
    assert ended.outcome.startswith("lane rolled back")
    child.version.refresh_from_db()
    assert child.version.quarantined_at is not None
    grandchild = PolicyVersion.objects.create(
        lineage=child.version.lineage,
        epoch=0,
        number=2,
        state="committed",
        parent=child.version,
        root="9" * 64,
        manifest_key="m",
        committed_at=release.version.committed_at,
    )
    with pytest.raises(Invalid, match="descends from"):
        release_propose(lane=lane_of(world), version=grandchild, run=None, proposer=None, actor=ACTOR, reason="x")


def test_only_what_answered_before_and_is_in_good_standing():
    world = shipping_world()
    first = world.lane.promoted_version
    release = promoted(world)
    with pytest.raises(Conflict, match="never answered"):
        lane_rollback(lane=lane_of(world), version=candidate_version(world), actor=ACTOR, reason="x")
    with pytest.raises(Invalid):
        lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="")
    with pytest.raises(StaleRevision):
        lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="x", expected_revision=999)
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    with pytest.raises(Conflict, match="good standing"):
        lane_rollback(lane=lane_of(world), version=release.version, actor=ACTOR, reason="x")


def test_no_replica_is_given_the_bad_version_again():
    world = shipping_world()
    first = world.lane.promoted_version
    release = promoted(world)
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    ReplicaSlot.objects.filter(replica=world.replica).update(current_version=None)  # the engine was started again
    slots_reconcile()
    lanes_place()
    wished = set(ReplicaSlot.objects.filter(replica=world.replica).values_list("desired_version", flat=True))
    assert release.version_id not in wished
    assert first.pk in wished


def test_a_lane_whose_version_is_quarantined_holds_up_no_other_lane():
    bad, good = shipping_world(), shipping_world()
    PolicyVersion.objects.filter(pk=bad.lane.promoted_version_id).update(quarantined_at="2026-01-01T00:00:00Z")
    ReplicaSlot.objects.update(desired_version=None, current_version=None)
    assert lanes_place() == 1
    assert ReplicaSlot.objects.filter(desired_version=good.lane.promoted_version).count() == 1


def test_a_canary_is_rolled_back_without_touching_what_answers():
    world = shipping_world()
    first = world.lane.promoted_version
    release = put_in(propose(world), ReleaseState.CANARY)
    release_rollback(release=release, actor=ACTOR, reason="odd answers")
    lane = lane_of(world)
    assert lane.promoted_version == first
    assert Release.objects.get(pk=release.pk).state == ReleaseState.ROLLED_BACK
    release.version.refresh_from_db()
    assert release.version.quarantined_at is not None
    assert ServedVersion.objects.get(release=release, arm=Arm.CANARY).until is not None
    assert_sound(lane)


def test_one_replica_that_holds_it_is_enough_and_the_others_follow():
    world = shipping_world()
    first = world.lane.promoted_version
    promoted(world)
    other = replica_register(
        cluster=world.cluster,
        name="serving-1",
        inference_url="http://127.0.0.1:3",
        control_url="http://127.0.0.1:4",
        actor=ACTOR,
        weight_slots=2,
    )
    Replica.objects.filter(pk=other.pk).update(state=ReplicaState.READY)
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="bad")
    assert lane.promoted_version == first
    lanes_place()
    assert ReplicaSlot.objects.filter(replica=other, desired_version=first, desired_source="promoted").count() == 1


def with_one_slot(world) -> None:
    """The replica is started again with a single slot, and holds what the lane serves."""
    named = Replica.objects.get(pk=world.replica.pk)
    replica_register(
        cluster=world.cluster,
        name=named.name,
        inference_url=named.inference_url,
        control_url=named.control_url,
        actor=ACTOR,
        weight_slots=1,
    )
    lanes_place()
    transfers_arrive(world)


def seats_of_promoted(world):
    return ReplicaSlot.objects.filter(replica=world.replica, current_version=lane_of(world).promoted_version)


def test_with_one_slot_the_bad_version_stops_at_once_and_the_replica_loads_the_old_one():
    world = shipping_world()
    first = world.lane.promoted_version
    release = promoted(world)
    with_one_slot(world)
    assert "503" in blast_of_rollback(lane_of(world), first).note
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="complaints")
    assert (lane.promoted_version, lane.rollback_to) == (first, None)
    assert Release.objects.get(pk=release.pk).state == ReleaseState.ROLLED_BACK
    wished = ReplicaSlot.objects.get(replica=world.replica)
    assert (wished.desired_version, wished.desired_source) == (first, DesiredSource.PROMOTED)
    assert world.replica.transfers.get(state="pending").version == first
    assert not seats_of_promoted(world).exists()  # requests come again until it is there
    assert lanes_place() == 0
    transfers_arrive(world)
    assert seats_of_promoted(world).count() == 1
    assert_sound(lane)


def test_a_pin_on_the_second_slot_does_not_stop_a_rollback():
    world = shipping_world()
    first = world.lane.promoted_version
    promoted(world)
    third = promoted(world)
    spare = ReplicaSlot.objects.get(replica=world.replica, current_version=third.incumbent)
    slot_target(
        replica=world.replica,
        slot=WeightSlot(spare.slot),
        version=third.incumbent,
        source=DesiredSource.PINNED,
        actor=ACTOR,
        reason="watched",
    )
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="complaints")
    assert lane.promoted_version == first
    wished = dict(ReplicaSlot.objects.filter(replica=world.replica).values_list("slot", "desired_version"))
    assert wished.pop(spare.slot) == third.incumbent_id
    assert list(wished.values()) == [first.pk]
    assert_sound(lane)


def test_nothing_is_waited_for_while_no_replica_answers():
    """What is rolled back may be what brings engines down."""
    world = shipping_world()
    first = world.lane.promoted_version
    promoted(world)
    promoted(world)
    lane = lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="complaints")
    assert lane.rollback_to == first
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.OFFLINE)
    advance_lanes()
    assert lane_of(world).promoted_version == first
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.READY)
    lanes_place()
    transfers_arrive(world)
    assert seats_of_promoted(world).exists()
    assert_sound(lane)


def test_a_replica_with_one_slot_that_was_away_for_a_rollback_follows_when_it_is_back():
    world = shipping_world()
    first = world.lane.promoted_version
    second = promoted(world)
    with_one_slot(world)
    ReplicaSlot.objects.filter(replica=world.replica).update(desired_version=second.version, desired_source="promoted")
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.OFFLINE)
    promoted_while_away = candidate_version(world, root="c" * 64)
    Lane.objects.filter(pk=world.lane.pk).update(promoted_version=promoted_while_away)
    lane_rollback(lane=lane_of(world), version=first, actor=ACTOR, reason="complaints")
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.READY)
    assert lanes_place() == 1
    assert ReplicaSlot.objects.get(replica=world.replica).desired_version == first
