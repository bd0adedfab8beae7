"""Replicas that are gone leave the fleet, and count for nothing before they do."""

from datetime import timedelta
from ipaddress import ip_network

import pytest
from django.db.models import Value
from django.db.models.functions import Now

from controlplane.conductor import fleet
from controlplane.conductor.fleet import fleet_poll, replicas_sweep
from controlplane.errors import Conflict
from controlplane.models import Cluster, Event, Loan, Replica, ReplicaSlot, Transfer, WorkUnit
from controlplane.selectors.rollout_plans import places
from controlplane.selectors.versions_needed import versions_needed
from controlplane.services.enrolment import replica_enrol
from controlplane.services.fleet import slot_target
from controlplane.services.forgetting import replica_forget, replica_forget_itself
from controlplane.services.lending import replica_lend
from controlplane.services.replica_reports import ReplicaReport, replica_report
from controlplane.services.residency import candidate_load
from controlplane.states import DesiredSource, EventType, ReplicaState, WeightSlot, WorkState
from tests.domain_factories import TESTER, make_cluster, make_project
from tests.lending_rows import lending_world

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def networks(settings):
    settings.REPLICA_NETWORKS = [ip_network("10.1.0.0/16")]


def enrolled(cluster, name, *, over=None):
    """A replica with a lease, which was over for so long."""
    urls = {"inference_url": "http://10.1.0.7:1", "control_url": "http://10.1.0.7:2"}
    replica = replica_enrol(cluster=cluster, name=name, **urls, weight_slots=2, lease_s=30, actor=TESTER).replica
    replica_report(replica=replica, report=ReplicaReport(reachable=True))
    if over is not None:
        Replica.objects.filter(pk=replica.pk).update(lease_until=Now() - Value(over))
    replica.refresh_from_db()
    return replica


def offline(replica):
    Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.OFFLINE)
    replica.refresh_from_db()
    return replica


def test_what_is_forgotten_takes_its_rows_along_and_leaves_an_event():
    world = lending_world(replicas=1)
    replica = offline(world.replica)
    head = world.next_head()
    slot_target(
        replica=replica, slot=WeightSlot.CANDIDATE, version=head, source=DesiredSource.PINNED, actor=TESTER, reason="x"
    )
    unit = WorkUnit.objects.get(ref=Transfer.objects.get(version=head).pk)
    ReplicaSlot.objects.filter(replica=replica).update(current_version=head)
    replica_forget(replica=replica, actor=TESTER, reason="the machine was sold")
    assert not Replica.objects.filter(pk=replica.pk).exists()
    assert not Transfer.objects.filter(version=head).exists()
    assert WorkUnit.objects.get(pk=unit.pk).state == WorkState.CANCELLED
    told = Event.objects.filter(type=EventType.REPLICA_STEERED).latest("pk")
    assert (told.data["name"], told.data["action"], told.reason) == ("serving-0", "forgotten", "the machine was sold")
    assert "held by a replica" not in versions_needed().get(head.pk, [])


def test_a_loan_goes_with_its_replica():
    world = lending_world(replicas=1)
    replica_lend(replica=world.replica, run=world.run, actor=TESTER, reason="night")
    replica_forget(replica=offline(world.replica), actor=TESTER, reason="x")
    assert not Loan.objects.exists()


def test_what_may_still_be_there_is_not_forgotten():
    project = make_project()
    here, far = make_cluster(project), make_cluster(project, slug="far")
    Cluster.objects.filter(pk=here.pk).update(local=True)
    own = far.replicas.get()
    own.state = ReplicaState.DRAINED
    own.save()
    for replica, why in (
        (offline(here.replicas.get()), "is local"),
        (own, "is drained"),
        (offline(enrolled(far, "a")), "is not over"),
    ):
        with pytest.raises(Conflict, match=why):
            replica_forget(replica=replica, actor=TESTER, reason="x")
    assert Replica.objects.count() == 3


def test_those_whose_lease_was_over_for_long_go_by_themselves(settings):
    settings.REPLICA_FORGET_S = 3600
    far = make_cluster(make_project(), slug="far")
    offline(far.replicas.get())
    gone = offline(enrolled(far, "gone", over=DAY))
    for name, over in (("young", timedelta(seconds=60)), ("there", None)):
        offline(enrolled(far, name, over=over))
    enrolled(far, "unswept", over=DAY)  # people see it go first
    replicas_sweep()
    assert set(Replica.objects.values_list("name", flat=True)) == {"far-0", "young", "there", "unswept"}
    back = offline(enrolled(far, "back", over=DAY))
    Replica.objects.filter(pk=back.pk).update(lease_until=Now() + Value(DAY))
    assert not replica_forget_itself(replica=back)
    assert not Replica.objects.filter(pk=gone.pk).exists()


def test_what_is_gone_takes_no_share_of_the_capacity_and_is_not_asked(monkeypatch):
    far = make_cluster(make_project(), slug="far", capacity=64, replicas=0)
    for number in range(3):
        enrolled(far, f"gone-{number}", over=DAY)
    there = enrolled(far, "there")
    assert [place.capacity for place in places({far.project_id})] == [64, 64]  # its two slots
    asked = []
    monkeypatch.setattr(fleet, "look_at", lambda replica: (asked.append(replica.pk), ReplicaReport(reachable=False))[1])
    fleet_poll()
    assert asked == [there.pk]


def test_no_candidate_is_sent_to_what_is_gone():
    world = lending_world(replicas=1)
    gone = enrolled(world.cluster, "gone", over=DAY)
    assert candidate_load(lane=world.lane, version=world.next_head(), actor=TESTER, reason="release") == 1
    assert not Transfer.objects.filter(replica=gone).exists()
