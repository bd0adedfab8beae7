"""Replicas: what they report, what they should hold, and transfers that are superseded."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from controlplane.conductor.fleet import bury_dead_transfers, look_at, rates, slots_reconcile
from controlplane.errors import Conflict, Invalid, StaleFence
from controlplane.models import Event, PolicyVersion, Replica, ReplicaSlot, Transfer, WorkUnit
from controlplane.services.fleet import replica_register, slot_target
from controlplane.services.replica_reports import ReplicaReport, SlotReport, replica_report
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.services.work import work_fail, work_replay
from controlplane.states import (
    DesiredSource,
    EventType,
    ReplicaState,
    TransferState,
    VersionState,
    WeightSlot,
    WorkState,
)
from rl_core.errors import SpecError
from tests.domain_factories import TESTER, make_run
from tests.simulated_workers import claim_of

pytestmark = pytest.mark.django_db


def fleet():
    run = make_run()
    return run, Replica.objects.select_related("cluster").filter(cluster__project=run.project).first()


def target(replica, version, **more):
    options = {"slot": WeightSlot.DEFAULT, "source": DesiredSource.TRAINING_HEAD, "actor": TESTER} | more
    return slot_target(replica=replica, version=version, **options)


def next_version(run, number=1):
    return PolicyVersion.objects.create(
        lineage=run.lineage, epoch=0, number=number, root="b" * 64, parent=run.lineage.head
    )


def committed(run, number=1):
    version = next_version(run, number)
    PolicyVersion.objects.filter(pk=version.pk).update(
        state=VersionState.COMMITTED, manifest_key="m", committed_at=now()
    )
    version.refresh_from_db()
    return version


def report(version):
    return TransferReport(root=version.root, fetched_bytes=5, hops=1, timings={"pause_s": 0.01})


def unit(transfer):
    return WorkUnit.objects.get(ref=transfer.pk)


def test_targeting_twice_is_one_transfer_and_a_newer_target_supersedes():
    run, replica = fleet()
    first = target(replica, run.lineage.head)
    assert target(replica, run.lineage.head).pk == first.pk
    claim = claim_of(unit(first))
    transfer_begin(claim)
    second = target(replica, committed(run))
    first.refresh_from_db()
    assert (first.state, second.state) == (TransferState.SUPERSEDED, TransferState.PENDING)
    with pytest.raises(StaleFence):
        transfer_done(claim, report=report(run.lineage.head))
    slot = ReplicaSlot.objects.get(replica=replica)
    assert (slot.desired_version, slot.current_version) == (second.version, None)


def test_only_committed_versions_in_good_standing_are_targets():
    run, replica = fleet()
    with pytest.raises(Conflict):
        target(replica, next_version(run))


def test_a_root_that_is_not_the_versions_is_refused():
    run, replica = fleet()
    claim = claim_of(unit(target(replica, run.lineage.head)))
    transfer_begin(claim)
    with pytest.raises(Conflict, match="reports root"):
        transfer_done(claim, report=TransferReport(root="f" * 64, fetched_bytes=0, hops=0, timings={}))
    assert Transfer.objects.get().state == TransferState.RUNNING


def test_a_dead_transfer_has_failed_and_a_replay_takes_it_up_again():
    run, replica = fleet()
    transfer = target(replica, run.lineage.head)
    claim = claim_of(unit(transfer))
    transfer_begin(claim)
    work_fail(claim, SpecError("no such manifest"))
    bury_dead_transfers()
    transfer.refresh_from_db()
    assert (transfer.state, transfer.error) == (TransferState.FAILED, "no such manifest")
    assert slots_reconcile() == 0  # not at once again
    work_replay(unit=unit(transfer), actor=TESTER, reason="put it back")
    claim = claim_of(unit(transfer))
    assert transfer_begin(claim).state == TransferState.RUNNING
    transfer_done(claim, report=report(run.lineage.head))
    assert unit(transfer).state == WorkState.DONE


def test_a_wish_is_as_old_as_what_was_missing_for_all_its_time():
    run, replica = fleet()
    head, slot = run.lineage.head, ReplicaSlot.objects.filter(replica=replica)
    target(replica, head)
    long_ago = now() - timedelta(hours=3)
    slot.update(desired_at=long_ago)
    Transfer.objects.update(state=TransferState.FAILED, finished_at=long_ago)
    Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
    assert slots_reconcile() == 1
    assert slot.get().desired_at == long_ago
    here = {"default": SlotReport(str(head.ref), head.root)}
    replica_report(replica=replica, report=ReplicaReport(reachable=True, slots=here))
    assert slot.get().desired_at == long_ago
    replica_report(replica=replica, report=ReplicaReport(reachable=True))  # started again, with nothing
    lost_at = slot.get().desired_at
    assert lost_at > long_ago
    target(replica, head, source=DesiredSource.PINNED)
    assert slot.get().desired_at == lost_at
    target(replica, committed(run), unpin=True)
    assert slot.get().desired_at > lost_at


def test_what_a_replica_reports_is_written_and_told_once():
    run, replica = fleet()
    said = ReplicaReport(
        reachable=True,
        slots={"default": SlotReport(str(run.lineage.head.ref), run.lineage.head.root)},
        metrics={"busy_s_total": 1.0},
    )
    before = Event.objects.filter(type=EventType.REPLICA_CHANGED).count()
    for _ in range(3):
        replica = replica_report(replica=replica, report=said)
    slot = ReplicaSlot.objects.get(replica=replica)
    assert (slot.current_version, slot.current_root) == (run.lineage.head, run.lineage.head.root)
    assert replica.state == ReplicaState.READY
    assert Event.objects.filter(type=EventType.REPLICA_CHANGED).count() == before + 1
    replica = replica_report(replica=replica, report=ReplicaReport(reachable=False, error="refused"))
    assert (replica.state, replica.error) == (ReplicaState.OFFLINE, "refused")
    assert ReplicaSlot.objects.get(replica=replica).current_version == run.lineage.head
    faulty = {"default": SlotReport(str(run.lineage.head.ref), run.lineage.head.root, "poisoned: a torn write")}
    replica = replica_report(replica=replica, report=ReplicaReport(reachable=True, slots=faulty))
    assert (replica.state, replica.error) == (ReplicaState.POISONED, "slot default: poisoned: a torn write")


@pytest.mark.parametrize("text", ["", "nonsense", "tiny:0-0", "00000000-0000-0000-0000-000000000000:0-0"])
def test_a_version_that_is_not_ours_counts_as_none(text):
    _, replica = fleet()
    replica_report(replica=replica, report=ReplicaReport(reachable=True, slots={"default": SlotReport(text, "c" * 64)}))
    slot = ReplicaSlot.objects.get(replica=replica)
    assert (slot.current_version, slot.current_root) == (None, "c" * 64)


def test_a_replica_that_moved_keeps_its_row():
    _, replica = fleet()
    again = replica_register(
        cluster=replica.cluster, name=replica.name, inference_url="http://new", control_url="http://new", actor=TESTER
    )
    assert (again.pk, again.inference_url) == (replica.pk, "http://new")
    with pytest.raises(Invalid):
        replica_register(
            cluster=replica.cluster, name="x", inference_url="", control_url="", actor=TESTER, weight_slots=3
        )


def test_a_replica_that_comes_back_with_fewer_slots_loses_the_rest():
    run, replica = fleet()
    named = {"name": replica.name, "inference_url": "http://x", "control_url": "http://x", "actor": TESTER}
    replica_register(cluster=replica.cluster, weight_slots=2, **named)
    slot_target(
        replica=replica,
        slot=WeightSlot.CANDIDATE,
        version=run.lineage.head,
        source=DesiredSource.CANDIDATE,
        actor=TESTER,
    )
    replica_register(cluster=replica.cluster, weight_slots=1, **named)
    assert [slot.slot for slot in replica.slots.all()] == ["default"]
    assert set(Transfer.objects.filter(slot="candidate").values_list("state", flat=True)) == {"superseded"}


def test_looking_at_a_replica_that_is_not_there_never_raises(settings, tmp_path):
    _, replica = fleet()
    settings.REPLICA_TOKEN_DIR = tmp_path
    assert not look_at(replica).reachable
    (tmp_path / f"{replica.pk}.control").write_text("secret")
    said = look_at(replica)
    assert (said.reachable, "no answer" in said.error) == (False, True)


def test_rates_are_told_from_two_looks_or_not_at_all():
    before = {"polled_at": 10.0, "busy_s_total": 1.0, "generated_tokens_total": 100}
    now = {"polled_at": 14.0, "busy_s_total": 4.0, "generated_tokens_total": 300}
    assert rates(before, now) == {"idle_share": 0.25, "tokens_per_s": 50.0}
    assert rates({}, now) == {}
    assert rates(now, {**before, "polled_at": 20.0}) == {}  # started again in between
