"""Replicas of a lane's cluster are told to hold what the lane serves, and are left alone where they do."""

from __future__ import annotations

import pytest

from controlplane.conductor.lanes import lanes_place
from controlplane.models import Lane, Replica, ReplicaSlot, Transfer
from controlplane.states import DesiredSource, ReplicaState
from tests.lane_rows import candidate_version, lane_world

pytestmark = pytest.mark.django_db


def fresh():
    """A lane whose replica has been told nothing yet."""
    world = lane_world()
    ReplicaSlot.objects.filter(replica=world.replica).update(desired_version=None, current_version=None)
    return world


def desired(world):
    rows = ReplicaSlot.objects.filter(replica=world.replica).order_by("slot")
    return {row.slot: (row.desired_version, row.desired_source) for row in rows}


def test_a_new_lane_is_placed_once():
    world = fresh()
    assert lanes_place() == 1
    assert lanes_place() == 0
    assert desired(world)["default"] == (world.lane.promoted_version, DesiredSource.PROMOTED)
    assert Transfer.objects.filter(replica=world.replica).count() == 1


@pytest.mark.django_db(transaction=True)
def test_the_conductor_places_a_lane_in_transactions_of_its_own():
    world = fresh()
    assert lanes_place() == 1
    assert desired(world)["default"] == (world.lane.promoted_version, DesiredSource.PROMOTED)


def test_a_replica_that_is_away_is_placed_when_it_is_back():
    world = fresh()
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.OFFLINE)
    assert lanes_place() == 0
    Replica.objects.filter(pk=world.replica.pk).update(state=ReplicaState.READY)
    assert lanes_place() == 1


def test_after_a_promotion_the_slot_that_holds_the_version_already_is_enough():
    world = fresh()
    version = candidate_version(world)
    ReplicaSlot.objects.filter(replica=world.replica, slot="candidate").update(
        desired_version=version, desired_source=DesiredSource.PROMOTED
    )
    Lane.objects.filter(pk=world.lane.pk).update(promoted_version=version)
    assert lanes_place() == 0


def test_candidates_and_pins_are_left_alone():
    world = fresh()
    version = candidate_version(world)
    slots = ReplicaSlot.objects.filter(replica=world.replica)
    slots.filter(slot="default").update(desired_version=version, desired_source=DesiredSource.PINNED)
    slots.filter(slot="candidate").update(desired_version=version, desired_source=DesiredSource.CANDIDATE)
    assert lanes_place() == 0
