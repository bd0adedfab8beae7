"""Locks are taken in one order: no two transactions wait for each other."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from controlplane.conductor.fleet import bury_dead_transfers
from controlplane.conductor.lanes import lanes_place
from controlplane.conductor.lending import loans_advance, policies_look
from controlplane.conductor.shipping import advance_lanes
from controlplane.models import Release, ReplicaSlot, Transfer, WorkUnit
from controlplane.selectors.canary_outcomes import CanaryRows
from controlplane.services import replica_reports
from controlplane.services.canaries import Look, canary_conclude
from controlplane.services.enrolment import replica_enrol, replica_renew
from controlplane.services.fleet import replica_register
from controlplane.services.lending import replica_lend, replica_return
from controlplane.services.promotions import lane_rollback, release_promote, release_rollback
from controlplane.services.quarantine import version_quarantine
from controlplane.services.releases import release_end
from controlplane.services.replica_reports import ReplicaReport, SlotReport, replica_report
from controlplane.services.residency import candidate_load, candidate_withdraw
from controlplane.services.shadows import shadow_record
from controlplane.services.steering import (
    replica_drain,
    replica_pin,
    replica_repair,
    replica_repair_itself,
    replica_undrain,
    replica_unpin,
)
from controlplane.services.transfers import TransferProgress, TransferReport, transfer_begin, transfer_done
from controlplane.services.transfers import transfer_progress as progress
from controlplane.services.work import work_enqueue
from controlplane.states import CanaryVerdict, ReleaseState, TransferState, WeightSlot, WorkKind, WorkState
from rl_core.shipping.canary import CanaryLook, Verdict
from tests.domain_factories import TESTER
from tests.lane_rows import candidate_version
from tests.lending_rows import ALWAYS, lending_world
from tests.lock_order import faults
from tests.shipping_rig import (
    canary_spec,
    evaluate,
    lane_of,
    propose,
    put_in,
    shipping_world,
    step_of,
    to_canary,
    transfers_arrive,
)
from tests.simulated_workers import claim_of

CANDIDATE = WeightSlot.CANDIDATE


class Acts:
    """One world, in which each act is tried in turn and its statements are read."""

    def __init__(self) -> None:
        self.broken: dict[str, list[str]] = {}
        self.seen = 0

    @contextmanager
    def named(self, name):
        """The transactions of one act. Each of them ends where the outermost block does."""
        with CaptureQueriesContext(connection) as captured:
            yield
        sent = [query["sql"] for query in captured.captured_queries]
        one: list[str] = []
        for sql in [*sent, "COMMIT"]:
            if sql.startswith(("BEGIN", "COMMIT", "ROLLBACK")) and "SAVEPOINT" not in sql:
                self.seen += any("controlplane_topic" in each for each in one)
                if faults(one):
                    self.broken.setdefault(name, []).extend(faults(one))
                one = []
            else:
                one.append(sql)


def poisoned(world, slot="candidate"):
    version = world.lane.promoted_version
    well = {name: SlotReport(str(version.ref), version.root) for name in ("default", "candidate")}
    well[slot] = SlotReport(str(version.ref), version.root, "poisoned")
    return ReplicaReport(reachable=True, slots=well, metrics={"running": 0, "waiting": 0})


def well(world):
    version = world.lane.promoted_version
    said = SlotReport(str(version.ref), version.root)
    return ReplicaReport(reachable=True, slots={"default": said, "candidate": said}, metrics={})


@pytest.mark.django_db(transaction=True)
def test_what_is_done_to_replicas_locks_in_order():
    acts, world = Acts(), lending_world(replicas=2)
    replica, home = world.replica, world.lane.promoted_version
    world.next_head()
    said = {"actor": TESTER, "reason": "a test"}
    with acts.named("lend"):
        replica_lend(replica=replica, run=world.run, **said)
    head = world.next_head()
    with acts.named("a loan that follows"):
        loans_advance()
    claim = claim_of(WorkUnit.objects.get(ref=Transfer.objects.get(version=head).pk))
    with acts.named("transfer begun"):
        transfer_begin(claim)
    moved = TransferProgress(phase="fetch", done_bytes=1, total_bytes=2, bytes_per_s=1.0, remaining_s=None)
    with acts.named("transfer under way"):
        progress(claim, progress=moved)
    with acts.named("transfer done"):
        transfer_done(claim, report=TransferReport(root=head.root, fetched_bytes=1, hops=1, timings={}))
    with acts.named("return"):
        replica_return(replica=replica, **said)
    world.arrive()
    with acts.named("returned"):
        loans_advance()
    replica_lend(replica=replica, run=world.run, **said)
    with acts.named("drain, lent"):
        replica_drain(replica=replica, **said)
    with acts.named("undrain"):
        replica_undrain(replica=replica, **said)
    with acts.named("pin over a transfer"):
        replica_pin(replica=replica, slot=CANDIDATE, version=home, **said)
    with acts.named("unpin"):
        replica_unpin(replica=replica, slot=CANDIDATE, **said)
    for name, look in (("poisoned", poisoned(world)), ("well", well(world)), ("again", poisoned(world))):
        with acts.named(name):
            replica_report(replica=replica, report=look)
    with acts.named("repair"):
        replica_repair(replica=replica, **said)
    with acts.named("repair by itself"):
        replica_repair_itself(replica=replica)
    world.policy(**ALWAYS)
    with acts.named("policy"):
        policies_look()
    ReplicaSlot.objects.filter(replica__cluster=world.cluster).update(desired_version=None, desired_source="")
    with acts.named("placing"):
        lanes_place()
    WorkUnit.objects.filter(kind=WorkKind.TRANSFER, state=WorkState.QUEUED).update(state=WorkState.DEAD)
    with acts.named("transfer dies"):
        bury_dead_transfers()
    assert Transfer.objects.filter(state=TransferState.FAILED).exists()
    with acts.named("registered anew"):
        replica_register(
            cluster=world.cluster, name=replica.name, inference_url="http://a:1", control_url="http://a:2",
            weight_slots=1, actor=TESTER,
        )  # fmt: skip
    with acts.named("enrolled"):
        enrolled = replica_enrol(
            cluster=world.cluster, name="far", inference_url="https://far.example:1",
            control_url="https://far.example:2", weight_slots=2, lease_s=30, actor=TESTER,
        )  # fmt: skip
    replica_report(replica=enrolled.replica, report=well(world))
    with acts.named("lease given up"):
        replica_renew(replica=enrolled.replica, lease_s=0)
    assert acts.broken == {}
    assert acts.seen >= 20


def look(release, verdict):
    """A look at the release's canary that shows the verdict."""
    found = CanaryLook(verdict=verdict, enough_users=True, reasons=["x"], effects={}, sample_ratio_p=1.0)
    return Look(step_of(release), CanaryRows({}, [], {}), found)


@pytest.mark.django_db(transaction=True)
def test_what_judges_a_candidate_locks_in_order():
    acts, world = Acts(), shipping_world(approvals=0, auto_promote=True, canary=canary_spec(steps=[0.5]))
    release = propose(world)
    advance_lanes()
    transfers_arrive(world)
    evaluate(release, candidate=0.1)
    with acts.named("gate that fails"):
        advance_lanes()
    assert Release.objects.get(pk=release.pk).state == ReleaseState.FAILED
    release = to_canary(world)
    with acts.named("harm in the canary"):
        canary_conclude(release=release, look=look(release, Verdict.FAIL))
    assert Release.objects.get(pk=release.pk).state == ReleaseState.ROLLED_BACK
    release = to_canary(world)
    with acts.named("promoted by itself"):
        canary_conclude(release=release, look=look(release, Verdict.PASS))
    assert lane_of(world).promoted_version == release.version
    release = to_canary(world)
    release.steps.update(verdict=CanaryVerdict.PASS)
    with acts.named("promoted by a person"):
        release_promote(release=release, actor=TESTER, reason="x")
    assert lane_of(world).promoted_version == release.version
    assert acts.broken == {}
    assert acts.seen >= 4


@pytest.mark.django_db(transaction=True)
def test_what_moves_a_lane_locks_in_order():
    acts, world = Acts(), shipping_world(approvals=0)
    lane, first = lane_of(world), world.lane.promoted_version
    loaded = candidate_version(world, root="c" * 64)
    with acts.named("candidate"), transaction.atomic():
        candidate_load(lane=lane, version=loaded, actor=TESTER, reason="x")
    with acts.named("candidate withdrawn"), transaction.atomic():
        candidate_withdraw(lane=lane, version=loaded, actor=TESTER)
    release = propose(world)
    with acts.named("gate"):
        advance_lanes()
    with acts.named("abort"):
        release_end(release=release, actor=TESTER, reason="x")
    release = put_in(propose(world), ReleaseState.SHADOW)
    with transaction.atomic():
        work_enqueue(kind=WorkKind.SHADOW, ref=release.pk, project_id=world.project.pk)
    claim = claim_of(WorkUnit.objects.get(kind=WorkKind.SHADOW))
    with acts.named("shadow"):
        shadow_record(claim, asked=2, replays=[])
    release_end(release=release, actor=TESTER, reason="x")
    release = to_canary(world)
    with acts.named("rolled back in the canary"):
        release_rollback(release=release, actor=TESTER, reason="x")
    release = put_in(propose(world), ReleaseState.PROMOTED)
    assert lane_of(world).promoted_version == release.version
    ReplicaSlot.objects.filter(replica=world.replica).update(current_version=release.version)
    with acts.named("rollback that waits"):
        lane_rollback(lane=lane_of(world), version=first, actor=TESTER, reason="x")
    assert lane_of(world).rollback_to == first
    transfers_arrive(world)
    with acts.named("rollback that is there"):
        advance_lanes()
    assert lane_of(world).promoted_version == first
    assert acts.broken == {}
    assert acts.seen >= 7


ACTS = {
    "pin": lambda world: replica_pin(
        replica=world.replica, slot=CANDIDATE, version=world.lane.promoted_version, actor=TESTER, reason="x"
    ),
    "drain": lambda world: replica_drain(replica=world.replica, actor=TESTER, reason="x"),
    "repair": lambda world: replica_repair(replica=world.replica, actor=TESTER, reason="x"),
    "return": lambda world: replica_return(replica=world.replica, actor=TESTER, reason="x"),
    "follow": lambda world: loans_advance(),
    "quarantine": lambda world: transaction.atomic(version_quarantine)(version=world.run.lineage.head),
    "candidate": lambda world: transaction.atomic(candidate_load)(
        lane=world.lane, version=world.lane.promoted_version, actor=TESTER, reason="x"
    ),
    "transfer": lambda world: transfer_begin(claim_of(WorkUnit.objects.get(kind=WorkKind.TRANSFER, state="queued"))),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("act", ACTS)
def test_an_act_and_a_look_at_the_replica_never_wait_for_each_other(act, monkeypatch):
    world = lending_world(replicas=2)
    world.next_head()
    replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason="night")
    about_to_append, go_on = threading.Event(), threading.Event()
    append = replica_reports.replica_changed

    def held(*args, **kwargs):
        about_to_append.set()
        assert go_on.wait(60)
        append(*args, **kwargs)

    monkeypatch.setattr(replica_reports, "replica_changed", held)
    errors = []
    look = thread(errors, lambda: replica_report(replica=world.replica, report=well(world)))
    assert about_to_append.wait(60)
    done = thread(errors, lambda: ACTS[act](world))
    await_blocked(done)
    go_on.set()
    for one in (look, done):
        one.join(60)
    assert errors == []


def thread(errors, work):
    """Run it in a thread with a connection of its own; what it raises is collected."""

    def body():
        try:
            work()
        except Exception as error:  # noqa: BLE001
            errors.append(f"{type(error).__name__}: {error}")
        finally:
            connections.close_all()

    started = threading.Thread(target=body)
    started.start()
    return started


def await_blocked(waiting):
    """Until the thread's transaction waits for another's lock, or the thread has ended."""
    while waiting.is_alive():
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            if cursor.fetchone()[0]:
                return
        time.sleep(0.02)
