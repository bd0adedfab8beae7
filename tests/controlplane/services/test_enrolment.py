"""Replicas that register themselves: a lease by the database's clock, tokens that follow from the server's key."""

import uuid
from ipaddress import ip_network

import pytest
from django.db.models import F
from django.db.models.functions import Now

from controlplane.conductor.fleet import control_client, leases_sweep, look_at
from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.models import Event, Replica
from controlplane.selectors.lane_routes import lane_route
from controlplane.selectors.replica_tokens import Listener, enrolled_reach, replica_token
from controlplane.selectors.rollout_plans import places
from controlplane.services.enrolment import replica_enrol, replica_renew
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.replica_reports import ReplicaReport, replica_report
from controlplane.states import EventType, ReplicaState, Scope
from rl_core.types import ClusterRole
from tests.controlplane.api.api_factories import client_of, make_key
from tests.domain_factories import TESTER, make_project
from tests.lane_rows import lane_world
from workers.replicas import inference_client

pytestmark = pytest.mark.django_db

URLS = {"inference_url": "http://10.1.0.7:8001", "control_url": "http://10.1.0.7:8002"}


@pytest.fixture(autouse=True)
def networks(settings):
    settings.REPLICA_NETWORKS = [ip_network("10.1.0.0/16")]


def remote_cluster(**values):
    fields = {"slug": "far", "role": ClusterRole.ROLLOUT, "region": "far", "capacity": 8} | values
    return cluster_create(project=make_project(), actor=TESTER, **fields)


def enrol(cluster, name="far-1", *, lease_s=30, **values):
    fields = URLS | values
    return replica_enrol(cluster=cluster, name=name, weight_slots=1, lease_s=lease_s, actor=TESTER, **fields)


def well(replica):
    return replica_report(replica=replica, report=ReplicaReport(reachable=True, metrics={"running": 0, "waiting": 0}))


def known(cluster):
    return [place.replica_id for place in places({cluster.project_id})]


def test_a_replica_is_known_while_its_lease_lasts_and_out_of_routing_the_moment_it_is_over():
    cluster = remote_cluster()
    replica = well(enrol(cluster).replica)
    assert (replica.state, known(cluster)) == (ReplicaState.READY, [replica.pk])
    Replica.objects.update(lease_until=Now())  # nobody looked since
    assert known(cluster) == []
    assert Replica.objects.get().state == ReplicaState.READY
    leases_sweep()
    lapsed = Replica.objects.get()
    assert (lapsed.state, lapsed.error) == (ReplicaState.OFFLINE, "its lease lapsed")
    events = Event.objects.filter(type=EventType.REPLICA_CHANGED).count()
    leases_sweep()
    assert Event.objects.filter(type=EventType.REPLICA_CHANGED).count() == events
    assert well(lapsed).state == ReplicaState.OFFLINE  # answering is not enough
    replica_renew(replica=lapsed, lease_s=30)
    assert (well(lapsed).state, known(cluster)) == (ReplicaState.READY, [replica.pk])


def test_a_lease_counts_from_now_by_the_databases_clock():
    replica = enrol(remote_cluster(), lease_s=600).replica
    replica_renew(replica=replica, lease_s=30)
    left = Replica.objects.annotate(left=F("lease_until") - Now()).get().left
    assert 25 < left.total_seconds() <= 30


def test_a_lease_of_nothing_is_given_up_at_once():
    cluster = remote_cluster()
    replica = well(enrol(cluster).replica)
    assert replica_renew(replica=replica, lease_s=0).state == ReplicaState.OFFLINE
    assert (known(cluster), Replica.objects.get().error) == ([], "it gave its lease up")


def test_coming_back_keeps_the_row_moves_the_address_and_has_tokens_of_its_own():
    cluster = remote_cluster()
    first = enrol(cluster)
    again = enrol(cluster, inference_url="http://10.1.0.8:8001")
    assert again.replica.pk == first.replica.pk
    assert not set(again.tokens.values()) & set(first.tokens.values())  # a name's next owner learns nothing
    assert again.tokens[Listener.CONTROL] == replica_token(first.replica.pk, Listener.CONTROL, enrolment=2)
    assert again.replica.inference_url == "http://10.1.0.8:8001"
    assert first.tokens[Listener.CONTROL] != first.tokens[Listener.INFERENCE]
    other = enrol(cluster, "far-2")
    assert not set(other.tokens.values()) & set(first.tokens.values())
    assert other.peer_token == first.peer_token != enrol(remote_cluster()).peer_token


def test_tokens_follow_from_the_servers_key(settings):
    replica_id = uuid.uuid4()
    before = replica_token(replica_id, Listener.CONTROL, enrolment=1)
    assert before == replica_token(replica_id, Listener.CONTROL, enrolment=1)
    settings.SECRET_KEY = "another"
    assert replica_token(replica_id, Listener.CONTROL, enrolment=1) != before


def test_the_operators_replicas_have_their_tokens_in_files(settings, tmp_path):
    settings.REPLICA_TOKEN_DIR = tmp_path
    cluster = remote_cluster()
    replica = replica_register(cluster=cluster, name="own", actor=TESTER, **URLS)
    with pytest.raises(FileNotFoundError):
        control_client(replica)
    control_client(enrol(cluster).replica).close()


@pytest.mark.parametrize(
    "values",
    [
        {"inference_url": "ftp://x:1"},
        {"control_url": "http://user:pw@x:1"},
        {"inference_url": "http://"},
        {"control_url": "http://x:99999999"},
        {"control_url": "https://gpu..example:1"},
        {"inference_url": "http://169.254.169.254/latest"},
        {"control_url": "http://127.0.0.1:5432"},
        {"control_url": "http://localhost:6379"},
        {"inference_url": "http://[::1]:1"},
        {"inference_url": "http://0.0.0.0:1"},
        {"control_url": "http://10.2.0.1:1"},
        {"control_url": "https://10.2.0.1:1"},
        {"lease_s": -1},
        {"lease_s": 86_400},
    ],
)
def test_what_is_no_engine_is_refused(values):
    cluster = remote_cluster()
    with pytest.raises(Invalid):
        enrol(cluster, **values)
    assert not Replica.objects.exists()


def test_the_operators_names_and_clusters_are_not_taken_over():
    cluster = remote_cluster()
    own = replica_register(cluster=cluster, name="own", actor=TESTER, inference_url="http://a", control_url="http://b")
    with pytest.raises(Conflict, match="registered by the operator"):
        enrol(cluster, "own")
    own.refresh_from_db()
    assert own.inference_url == "http://a"
    with pytest.raises(NotFound):
        replica_renew(replica=own, lease_s=30)
    with pytest.raises(Conflict, match="is local"):
        enrol(remote_cluster(slug="here", local=True))


def test_users_reach_an_enrolled_replica_with_its_derived_token():
    world = lane_world()
    cluster = world.cluster
    enrolled = enrol(cluster)
    replica = well(enrolled.replica)
    replica.slots.update(current_version=world.lane.promoted_version)
    seats = lane_route(project_id=world.project.pk, slug="assistant").promoted.seats
    wanted = (replica.pk, enrolled.tokens[Listener.INFERENCE], enrolled_reach())
    assert [(seat.replica_id, seat.token, seat.reach) for seat in seats] == [wanted]
    replica_renew(replica=replica, lease_s=0)
    assert lane_route(project_id=world.project.pk, slug="assistant").promoted.seats == ()


def test_a_key_of_the_replica_scope_registers_and_renews_and_nothing_else():
    cluster = remote_cluster()
    _, text = make_key(cluster.project, Scope.REPLICA)
    client, base = client_of(text), f"/api/v1/projects/{cluster.project.slug}"
    body = {"name": "far-1", **URLS}
    path = f"{base}/clusters/far/replicas"
    made = client.post(path, body, format="json", HTTP_IDEMPOTENCY_KEY="a")
    assert made.status_code == 200, made.content
    replica = Replica.objects.get()
    tokens = (made.json()["inference_token"], made.json()["control_token"])
    assert tokens == tuple(
        replica_token(replica.pk, one, enrolment=1) for one in (Listener.INFERENCE, Listener.CONTROL)
    )
    replay = client.post(path, body, format="json", HTTP_IDEMPOTENCY_KEY="a").json()
    assert (replay["inference_token"], replay["control_token"]) == (None, None)
    renewed = client.post(f"{base}/replicas/{replica.pk}/lease", {"lease_s": 60}, format="json")
    assert renewed.status_code == 200, renewed.content
    assert renewed.json()["lease_until"] > made.json()["replica"]["lease_until"]
    assert client.get(f"{base}/replicas").status_code == 403
    assert client.post(f"{base}/replicas/{replica.pk}/drain", {"reason": "x"}, format="json").status_code == 403
    long = client.post(f"{base}/replicas/{replica.pk}/lease", {"lease_s": 10**6}, format="json")
    assert (long.status_code, long.json()["field"]) == (422, "lease_s")


@pytest.mark.parametrize("url", ["https://localhost:1", "http://127.0.0.1:1"])
def test_where_a_name_leads_is_checked_when_it_is_asked(url):
    """The row may be older than the setting, and a name may lead elsewhere by now."""
    replica = enrol(remote_cluster()).replica
    Replica.objects.filter(pk=replica.pk).update(control_url=url, inference_url=url, state=ReplicaState.READY)
    replica.refresh_from_db()
    assert "public" in look_at(replica).error or "REPLICA_NETWORKS" in look_at(replica).error
    (place,) = places({replica.cluster.project_id})
    assert place.enrolment == 1
    assert inference_client(place)._http._transport._reach == enrolled_reach()
