"""What a transfer is told, and what it tells while it runs."""

from datetime import timedelta

import pytest
from django.db.models import Value
from django.db.models.functions import Now

from controlplane.errors import StaleFence
from controlplane.models import Cluster, Event, Publication, Replica, ReplicaSlot, Transfer, WorkUnit
from controlplane.selectors.followers import followers
from controlplane.selectors.publications import reading_of
from controlplane.selectors.transfer_plans import link_share, transfer_plan
from controlplane.services.fleet import slot_target
from controlplane.services.transfers import (
    TransferProgress,
    TransferReport,
    transfer_begin,
    transfer_done,
    transfer_progress,
)
from controlplane.states import DesiredSource, EventType, PublicationKind, ReplicaState, TransferState, WeightSlot
from rl_core.engines.protocol import Progress, SlotState, SlotStatus, UpdatePhase
from tests.domain_factories import TESTER, make_cluster, make_run
from tests.simulated_workers import claim_of
from workers.transfer import _Meter

pytestmark = pytest.mark.django_db

HALF = TransferProgress(phase="fetch", done_bytes=50, total_bytes=100, bytes_per_s=25.0, remaining_s=2.0)


def fleet(replicas=3):
    run = make_run()
    cluster = make_cluster(run.project, slug="north", replicas=replicas)
    rows = list(Replica.objects.filter(cluster=cluster).select_related("cluster").order_by("name"))
    for number, replica in enumerate(rows):
        Replica.objects.filter(pk=replica.pk).update(inference_url=f"http://10.0.0.{number}:1")
    return run, rows


def begun(replica, version):
    """A running transfer and its claim."""
    transfer = slot_target(
        replica=replica, slot=WeightSlot.DEFAULT, version=version, source=DesiredSource.TRAINING_HEAD, actor=TESTER
    )
    claim = claim_of(WorkUnit.objects.get(ref=transfer.pk))
    return transfer_begin(claim), claim


def test_a_clusters_bandwidth_is_shared_by_its_slots():
    run, (_, second) = fleet(replicas=2)
    transfer, _ = begun(second, run.lineage.head)
    assert transfer_plan(transfer).limit_bytes_s is None
    cluster = transfer.replica.cluster
    cluster.bandwidth_bytes_s = 900
    assert link_share(cluster) == 450
    ReplicaSlot.objects.create(replica=second, slot=WeightSlot.CANDIDATE)
    assert (link_share(cluster), transfer_plan(transfer).limit_bytes_s) == (300, 300)
    past = Now() - Value(timedelta(minutes=1))
    Replica.objects.filter(cluster=cluster).update(lease_until=past)
    assert link_share(cluster) == 450  # the first is gone; the second is too, but goes on at what it was told


def test_what_begins_one_after_another_takes_no_more_than_the_link_has():
    run, replicas = fleet(replicas=8)
    Cluster.objects.filter(pk=replicas[0].cluster_id).update(bandwidth_bytes_s=1000)
    Replica.objects.filter(cluster__slug__in=["east", "west"]).delete()
    first, *others = Replica.objects.filter(pk__in=[one.pk for one in replicas]).select_related("cluster")
    shares = [transfer_plan(begun(first, run.lineage.head)[0]).limit_bytes_s]
    ReplicaSlot.objects.filter(replica__in=others).update(
        desired_version=run.lineage.head, desired_source=DesiredSource.TRAINING_HEAD
    )
    ahead = [follower.limit_bytes_s for follower in followers(run) if follower.replica != first]
    for replica in others:
        shares.append(transfer_plan(begun(replica, run.lineage.head)[0]).limit_bytes_s)
    assert (sum(shares), shares[0] + sum(ahead)) == (1000, 1000)


def test_peers_are_those_of_the_cluster_that_have_the_version_or_are_getting_it():
    run, (me, holds, gets) = fleet()
    elsewhere = Replica.objects.filter(cluster__slug="east").select_related("cluster").get()
    ReplicaSlot.objects.filter(replica__in=[holds, elsewhere]).update(current_version=run.lineage.head)
    mine, _ = begun(me, run.lineage.head)
    assert transfer_plan(mine).peers == ["http://10.0.0.1:1"]
    begun(gets, run.lineage.head)
    assert transfer_plan(mine).peers == ["http://10.0.0.1:1", "http://10.0.0.2:1"]
    Replica.objects.filter(pk=holds.pk).update(state=ReplicaState.POISONED)
    assert transfer_plan(mine).peers == ["http://10.0.0.2:1"]


def test_skip_deltas_towards_the_version_are_told():
    run, (replica, *_) = fleet()
    head = run.lineage.head
    Publication.objects.create(
        version=head, base_version=None, kind=PublicationKind.SKIP, root=head.root, manifest_key="skips/1",
        published_at=Now(),
    )  # fmt: skip
    transfer, _ = begun(replica, head)
    reading = reading_of(transfer.version, since=transfer.from_version)
    assert reading is not None
    assert "skips/1" in reading.deltas


def test_progress_is_written_and_told_and_ends_with_the_transfer():
    run, (replica, *_) = fleet()
    transfer, claim = begun(replica, run.lineage.head)
    transfer_progress(claim, progress=HALF)
    transfer.refresh_from_db()
    assert (transfer.phase, transfer.done_bytes, transfer.total_bytes) == ("fetch", 50, 100)
    assert (transfer.bytes_per_s, transfer.remaining_s) == (25.0, 2.0)
    told = Event.objects.filter(type=EventType.TRANSFER_CHANGED).latest("pk").data
    assert (told["state"], told["done_bytes"], told["remaining_s"]) == ("running", 50, 2.0)
    transfer_done(claim, report=TransferReport(root=run.lineage.head.root, fetched_bytes=100, hops=1, timings={}))
    transfer.refresh_from_db()
    assert (transfer.phase, transfer.done_bytes, transfer.remaining_s) == ("", 100, None)
    with pytest.raises(StaleFence):
        transfer_progress(claim, progress=HALF)


def test_a_transfer_that_was_superseded_is_told_of_no_more():
    run, (replica, *_) = fleet()
    transfer, claim = begun(replica, run.lineage.head)
    Transfer.objects.filter(pk=transfer.pk).update(state=TransferState.SUPERSEDED)
    transfer_progress(claim, progress=HALF)
    transfer.refresh_from_db()
    assert transfer.done_bytes is None


def test_progress_is_written_now_and_then():
    run, (replica, *_) = fleet()
    transfer, claim = begun(replica, run.lineage.head)
    meter = _Meter(claim)
    for done in (10, 20, 30):
        progress = Progress(phase=UpdatePhase.FETCH, done_bytes=done, total_bytes=100, bytes_per_s=1.0)
        meter.note(SlotStatus(version=None, root="", state=SlotState.RECONCILING, progress=progress))
    transfer.refresh_from_db()
    assert transfer.done_bytes == 10
    meter._due = 0.0
    meter.note(SlotStatus(version=None, root="", state=SlotState.RECONCILING, progress=progress))
    transfer.refresh_from_db()
    assert transfer.done_bytes == 30
