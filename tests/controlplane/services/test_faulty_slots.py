"""A faulty slot holds nothing for users: the slot that still does is not lent, overwritten or counted twice."""

import pytest

from controlplane.conductor.lending import policies_look
from controlplane.errors import Conflict
from controlplane.models import LendingPolicy, Loan, ReplicaSlot
from controlplane.services.lending import answering_unlent, replica_lend, spare_slot
from controlplane.services.residency import candidate_load
from tests.domain_factories import TESTER
from tests.lane_rows import candidate_version
from tests.lending_rows import ALWAYS, lending_world
from tests.shipping_rig import shipping_world

pytestmark = pytest.mark.django_db


def both_hold(world, replica):
    """Both slots of the replica hold the promoted version."""
    version = world.lane.promoted_version
    replica.slots.update(current_version=version, desired_version=version, desired_source="promoted", fault="")


def faulty(replica, slot="default"):
    replica.slots.filter(slot=slot).update(fault="a torn write")


def test_the_slot_that_still_answers_is_not_lent():
    world = lending_world(replicas=1)
    both_hold(world, world.replica)
    slot, _ = spare_slot(world.replica)
    assert slot.slot == "candidate"
    faulty(world.replica)
    assert spare_slot(world.replica) == (None, "each of its slots answers users")
    with pytest.raises(Conflict, match="no slot to lend"):
        replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason="night")
    faulty(world.replica, "candidate")
    assert spare_slot(world.replica) == (None, "it does not hold what its users are answered with")


def test_the_slot_that_still_answers_is_not_where_a_candidate_is_loaded():
    world = shipping_world()
    both_hold(world, world.replica)
    faulty(world.replica)
    version = candidate_version(world, root="c" * 64)
    candidate_load(lane=world.lane, version=version, actor=TESTER, reason="x")
    wished = dict(ReplicaSlot.objects.filter(replica=world.replica).values_list("slot", "desired_version"))
    assert wished == {"default": version.pk, "candidate": world.lane.promoted_version_id}


def test_a_replica_whose_promoted_slot_is_faulty_is_not_one_that_is_kept_for_users():
    world = lending_world(replicas=2)
    world.policy(**(ALWAYS | {"keep": 1}))
    assert answering_unlent(world.cluster) == 2
    faulty(world.replicas[1])
    assert answering_unlent(world.cluster) == 1
    policies_look()
    assert (Loan.objects.count(), LendingPolicy.objects.get().note) == (0, "1 replica(s) are kept for users")
    both_hold(world, world.replicas[0])
    assert answering_unlent(world.cluster) == 1  # once, whatever it holds twice
