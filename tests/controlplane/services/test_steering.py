"""Replicas that are drained, pinned, poisoned and repaired."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F

from controlplane.conductor.fleet import poisoned_repair, slots_reconcile
from controlplane.conductor.lanes import lanes_place
from controlplane.errors import Conflict, Invalid
from controlplane.models import Event, Lineage, PolicyVersion, Replica, ReplicaSlot, Transfer, WorkUnit
from controlplane.selectors.lane_routes import lane_route
from controlplane.selectors.rollout_plans import places
from controlplane.services.fleet import slot_target
from controlplane.services.quarantine import version_quarantine
from controlplane.services.replica_reports import ReplicaReport, SlotReport, replica_report
from controlplane.services.residency import resident_somewhere
from controlplane.services.steering import (
    MAX_REPAIRS,
    replica_drain,
    replica_pin,
    replica_repair,
    replica_repair_itself,
    replica_undrain,
    replica_unpin,
    replicas_to_repair,
)
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.states import DesiredSource, EventType, ReplicaState, TransferState, WeightSlot
from tests.domain_factories import TESTER, make_model, make_run
from tests.lending_rows import lending_world
from tests.simulated_workers import claim_of

pytestmark = pytest.mark.django_db

IDLE = {"running": 0, "waiting": 0}


def fleet():
    run = make_run()
    replica = Replica.objects.select_related("cluster").filter(cluster__project=run.project).first()
    ReplicaSlot.objects.filter(replica=replica).update(
        desired_version=run.lineage.head, current_version=run.lineage.head, desired_source=DesiredSource.TRAINING_HEAD
    )
    return run, replica


def look(replica, run, *, metrics=IDLE, **slot):
    head = run.lineage.head
    said = SlotReport(**({"version": str(head.ref), "root": head.root} | slot))
    return replica_report(
        replica=replica, report=ReplicaReport(reachable=True, slots={"default": said}, metrics=metrics)
    )


def known(replica):
    return replica.pk in [place.replica_id for place in places({replica.cluster.project_id})]


def test_a_drained_replica_finishes_takes_nothing_new_and_stays_so():
    run, replica = fleet()
    look(replica, run, metrics={"running": 2, "waiting": 1})
    drained = replica_drain(replica=replica, actor=TESTER, reason="new disks")
    assert (drained.state, drained.drained_reason) == (ReplicaState.DRAINING, "new disks")
    assert not known(replica)
    assert look(replica, run, metrics={"running": 1, "waiting": 0}).state == ReplicaState.DRAINING
    assert look(replica, run).state == ReplicaState.DRAINED
    assert replica_report(replica=replica, report=ReplicaReport(reachable=False)).state == ReplicaState.OFFLINE
    assert look(replica, run).state == ReplicaState.DRAINED  # a restart undrains nothing
    assert look(replica, run, metrics={}).state == ReplicaState.DRAINING  # what is not told is not idle
    with pytest.raises(Conflict, match="drained already"):
        replica_drain(replica=replica, actor=TESTER, reason="again")
    assert replica_undrain(replica=replica, actor=TESTER, reason="done").state == ReplicaState.READY
    assert known(replica)
    with pytest.raises(Conflict, match="not drained"):
        replica_undrain(replica=replica, actor=TESTER, reason="again")
    told = [(event.data["action"], event.reason) for event in Event.objects.filter(type=EventType.REPLICA_STEERED)]
    assert told == [("drained", "new disks"), ("undrained", "done")]


def test_weights_go_on_reaching_a_drained_replica():
    run, replica = fleet()
    look(replica, run)
    replica_drain(replica=replica, actor=TESTER, reason="x")
    ReplicaSlot.objects.filter(replica=replica).update(current_version=None)
    assert slots_reconcile() == 1


def test_users_are_kept_from_a_drained_replica(settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    world = lending_world()
    for replica in world.replicas:
        (tmp_path / f"{replica.pk}.inference").write_text("secret")
    replica_drain(replica=world.replica, actor=TESTER, reason="x")
    seats = lane_route(project_id=world.project.pk, slug="assistant").promoted.seats
    assert [seat.replica_id for seat in seats] == [world.replicas[1].pk]


def test_acts_need_reasons():
    _, replica = fleet()
    for act in (replica_drain, replica_undrain, replica_repair):
        with pytest.raises(Invalid) as refusal:
            act(replica=replica, actor=TESTER, reason="  ")
        assert refusal.value.field == "reason"


def test_a_pin_wins_until_a_person_ends_it():
    run, replica = fleet()
    pin = {"replica": replica, "slot": WeightSlot.DEFAULT, "actor": TESTER}
    replica_pin(version=run.lineage.head, reason="look at it", **pin)
    slot = ReplicaSlot.objects.get(replica=replica)
    assert (slot.desired_source, slot.desired_reason) == (DesiredSource.PINNED, "look at it")
    for version, source in ((run.lineage.head, DesiredSource.TRAINING_HEAD), (None, None)):
        with pytest.raises(Conflict, match="is pinned"):
            slot_target(version=version, source=source, **pin)
    with pytest.raises(Invalid, match="no slot candidate"):
        replica_pin(**(pin | {"slot": WeightSlot.CANDIDATE}), version=run.lineage.head, reason="x")
    replica_unpin(reason="done", **pin)
    assert ReplicaSlot.objects.get(replica=replica).desired_version is None
    slot_target(version=run.lineage.head, source=DesiredSource.TRAINING_HEAD, **pin)
    with pytest.raises(Conflict, match="not pinned"):
        replica_unpin(reason="done", **pin)


def test_a_root_that_is_not_the_versions_poisons_whatever_the_replica_thinks():
    run, replica = fleet()
    poisoned = look(replica, run, root="f" * 64)
    assert poisoned.state == ReplicaState.POISONED
    assert "reports root ffff" in poisoned.error
    assert "reports root ffff" in ReplicaSlot.objects.get(replica=replica).fault
    assert not known(replica)
    assert slots_reconcile() == 0  # its repair is another's
    assert look(replica, run).state == ReplicaState.READY
    assert ReplicaSlot.objects.get(replica=replica).fault == ""


def waited(seconds=3600):
    Replica.objects.update(repaired_at=F("repaired_at") - timedelta(seconds=seconds))


def test_a_poisoned_replica_is_repaired_a_few_times_and_then_waits_for_a_person():
    run, replica = fleet()
    look(replica, run, fault="poisoned: a torn write")
    for number in range(1, MAX_REPAIRS + 1):
        poisoned_repair()
        poisoned_repair()  # not again at once
        transfer = Transfer.objects.latest("pk")
        assert (transfer.repair, transfer.version, Transfer.objects.count()) == (True, run.lineage.head, number)
        Transfer.objects.filter(pk=transfer.pk).update(state=TransferState.FAILED)
        waited()
    poisoned_repair()
    assert Transfer.objects.count() == MAX_REPAIRS
    actions = [event.data["action"] for event in Event.objects.filter(type=EventType.REPLICA_STEERED).order_by("pk")]
    assert actions[-1] == f"repair {MAX_REPAIRS} begun (the last by itself: then a person has to)"
    replica_repair(replica=replica, actor=TESTER, reason="the disk is new")
    assert (Transfer.objects.count(), Replica.objects.get(pk=replica.pk).repairs) == (MAX_REPAIRS + 1, 0)


def test_of_several_conductors_that_look_at_once_one_repairs():
    run, replica = fleet()
    look(replica, run, fault="poisoned")
    found = [replicas_to_repair() for _ in range(MAX_REPAIRS)]
    assert [replica_repair_itself(replica=row) for [row] in found] == [True, False, False]
    assert Replica.objects.get(pk=replica.pk).repairs == 1


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_holds_a_bad_version_is_repaired_to_what_users_are_answered_with(by_hand):
    world = lending_world(replicas=1)
    head, home = world.next_head(), world.lane.promoted_version
    ReplicaSlot.objects.filter(pk=world.slot().pk).update(current_version=head)
    with transaction.atomic():
        version_quarantine(version=head)
    slots = {
        "default": SlotReport(str(home.ref), home.root),
        "candidate": SlotReport(str(head.ref), head.root, "poisoned"),
    }
    replica_report(replica=world.replica, report=ReplicaReport(reachable=True, slots=slots, metrics=IDLE))
    if by_hand:
        replica_repair(replica=world.replica, actor=TESTER, reason="it holds what is bad")
    else:
        poisoned_repair()
    transfer = Transfer.objects.get(slot="candidate")
    assert (transfer.version, transfer.repair) == (home, True)
    assert (world.slot().desired_version, world.slot().desired_source) == (home, DesiredSource.PROMOTED)


def test_a_version_that_was_found_bad_meanwhile_is_not_pinned():
    world = lending_world(replicas=1)
    seen = world.next_head()
    with transaction.atomic():
        version_quarantine(version=type(seen).objects.get(pk=seen.pk))
    with pytest.raises(Conflict, match="found bad"):
        replica_pin(replica=world.replica, slot=WeightSlot.CANDIDATE, version=seen, actor=TESTER, reason="x")
    assert world.slot().desired_version is None


def test_a_replica_that_was_well_for_long_has_all_its_repairs_again():
    run, replica = fleet()
    look(replica, run, fault="poisoned")
    poisoned_repair()
    look(replica, run)
    waited(60)
    poisoned_repair()
    assert Replica.objects.get(pk=replica.pk).repairs == 1
    waited()
    poisoned_repair()
    assert Replica.objects.get(pk=replica.pk).repairs == 0


def test_a_faulty_slot_takes_only_itself_out_of_routing(settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    world = lending_world(replicas=1)
    replica, version = world.replica, world.lane.promoted_version
    well, torn = (
        SlotReport(str(version.ref), version.root),
        SlotReport(str(version.ref), version.root, "poisoned: torn"),
    )

    def said(default, candidate):
        report = ReplicaReport(reachable=True, slots={"default": default, "candidate": candidate}, metrics=IDLE)
        return replica_report(replica=replica, report=report)

    def seats():
        return [seat.slot for seat in lane_route(project_id=world.project.pk, slug="assistant").promoted.seats]

    (tmp_path / f"{replica.pk}.inference").write_text("token")
    assert (said(well, well).state, sorted(seats())) == (ReplicaState.READY, ["candidate", "default"])
    half = said(well, torn)
    assert (half.state, half.error) == (ReplicaState.READY, "slot candidate: poisoned: torn")
    assert (seats(), [place.slot for place in places({world.project.pk}) if place.replica_id == replica.pk]) == (
        ["default"],
        ["default"],
    )
    ReplicaSlot.objects.filter(replica=replica).update(desired_version=version)
    assert slots_reconcile() == 0
    for number in range(1, 3):
        poisoned_repair()
        poisoned_repair()  # not again at once, and the slot that is well is left alone
        repairs = Transfer.objects.filter(replica=replica, repair=True)
        assert [transfer.slot for transfer in repairs] == ["candidate"] * number
        repairs.update(state=TransferState.FAILED)
        waited()
    assert resident_somewhere(lane=world.lane, version=version)
    assert (said(torn, torn).state, seats()) == (ReplicaState.POISONED, [])
    assert not resident_somewhere(lane=world.lane, version=version)
    assert said(well, well).state == ReplicaState.READY
    waited()
    poisoned_repair()
    assert Replica.objects.get(pk=replica.pk).repairs == 0


def test_a_version_of_another_model_is_not_pinned():
    world = lending_world(replicas=1)
    other = make_run(world.project)
    Lineage.objects.filter(pk=other.lineage_id).update(model=make_model(world.project, slug="other"))
    pin = {"replica": world.replica, "slot": WeightSlot.DEFAULT, "actor": TESTER, "reason": "x"}
    stranger = PolicyVersion.objects.get(pk=other.lineage.head.pk)
    with pytest.raises(Invalid, match="is not of tiny"):
        replica_pin(version=stranger, **pin)
    replica_pin(version=world.run.lineage.head, **pin)


def test_a_repair_is_a_transfer_of_its_own_even_of_what_is_on_its_way():
    run, replica = fleet()
    look(replica, run)
    plain = slot_target(
        replica=replica, slot=WeightSlot.DEFAULT, version=run.lineage.head, source=DesiredSource.TRAINING_HEAD,
        actor=TESTER,
    )  # fmt: skip
    replica_repair(replica=replica, actor=TESTER, reason="bits may have flipped")
    plain.refresh_from_db()
    repair = Transfer.objects.latest("pk")
    assert (plain.state, repair.repair) == (TransferState.SUPERSEDED, True)
    replica_repair(replica=replica, actor=TESTER, reason="again")
    assert Transfer.objects.latest("pk") == repair  # it is under way
    claim = claim_of(WorkUnit.objects.get(ref=repair.pk))
    assert transfer_begin(claim).repair
    transfer_done(claim, report=TransferReport(root=run.lineage.head.root, fetched_bytes=9, hops=1, timings={}))
    slot = ReplicaSlot.objects.get(replica=replica)
    assert (slot.desired_source, slot.current_version) == (DesiredSource.TRAINING_HEAD, run.lineage.head)


def test_what_is_offline_or_told_nothing_is_not_repaired():
    run, replica = fleet()
    ReplicaSlot.objects.filter(replica=replica).update(desired_version=None, current_version=None)
    look(replica, run, version="", root="")
    with pytest.raises(Conflict, match="told to hold no version"):
        replica_repair(replica=replica, actor=TESTER, reason="x")
    Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.OFFLINE)
    with pytest.raises(Conflict, match="offline"):
        replica_repair(replica=replica, actor=TESTER, reason="x")


def test_lanes_place_nothing_on_a_drained_replica():
    world = lending_world(replicas=1)
    ReplicaSlot.objects.filter(replica=world.replica).update(desired_version=None, desired_source="")
    replica_drain(replica=world.replica, actor=TESTER, reason="x")
    assert lanes_place() == 0
    replica_undrain(replica=world.replica, actor=TESTER, reason="x")
    assert lanes_place() == 1
