"""Acts on replicas and lending by the API: what they answer, and what stands against them."""

import pytest

from controlplane.models import Cluster, Project
from controlplane.states import Scope
from rl_core.types import ClusterRole
from tests.controlplane.api.api_factories import client_of, make_key
from tests.lending_rows import ALWAYS, lending_world

pytestmark = pytest.mark.django_db


@pytest.fixture
def world():
    return lending_world(allowed=False)


@pytest.fixture
def post(world):
    client = client_of(make_key(world.project, Scope.FLEET)[1])

    def send(path, **body):
        answer = client.post(f"/api/v1/projects/{world.project.slug}/{path}", body, format="json")
        return answer.status_code, answer.json()

    send.get = lambda path: client.get(f"/api/v1/projects/{world.project.slug}/{path}").json()
    return send


def test_a_replica_is_drained_and_undrained(world, post):
    path = f"replicas/{world.replica.pk}"
    assert post(f"{path}/drain", reason="")[0] == 422
    status, drained = post(f"{path}/drain", reason="new disks")
    assert (status, drained["state"], drained["drained_reason"]) == (200, "drained", "new disks")
    assert post(f"{path}/drain", reason="again")[0] == 409
    status, back = post(f"{path}/undrain", reason="done")
    assert (status, back["state"], back["drained_at"]) == (200, "ready", None)


def test_a_replica_is_lent_and_called_back(world, post):
    path = f"replicas/{world.replica.pk}"
    lend = {"run": str(world.run.pk), "reason": "the night is quiet"}
    status, refused = post(f"{path}/lend", **lend)
    assert (status, "does not allow" in refused["detail"]) == (409, True)
    assert post("lending", allowed=True, reason="nights only")[1]["lending_allowed"]
    assert Project.objects.get(pk=world.project.pk).lending_allowed
    status, lent = post(f"{path}/lend", **lend)
    assert status == 200
    assert (lent["loan"]["state"], lent["loan"]["by_hand"], lent["loan"]["run"]) == ("lent", True, str(world.run.pk))
    slots = {slot["slot"]: (slot["desired_source"], slot["desired_reason"]) for slot in lent["slots"]}
    assert slots["candidate"] == ("lent", f"lent to run {world.run.name}")
    assert post.get("loans?state=lent")["results"][0]["reason"] == "the night is quiet"
    status, back = post(f"{path}/return", reason="morning")
    assert (status, back["loan"]["state"], back["loan"]["return_reason"]) == (200, "returning", "morning")
    assert post(f"{path}/lend", run=str(world.replica.pk), reason="x")[0] == 422


def test_a_policy_is_set_and_read(world, post):
    path = "clusters/serving/lending"
    status, refused = post(path, spec={"windows": [{"days": [9]}]}, reason="x")
    assert (status, refused["field"]) == (422, "spec")
    status, policy = post(path, spec=ALWAYS, reason="nights are quiet")
    assert (status, policy["enabled"], policy["spec"]["return_within_s"]) == (200, True, 120.0)
    assert post.get(path)["spec"] == policy["spec"]
    assert "windows" in str(post.get("lending-schema"))


def test_a_clusters_bandwidth_is_set_and_lifted(world, post):
    path = "clusters/serving/configure"
    assert post(path, bandwidth_bytes_s=25_000_000, reason="the link is shared")[1]["bandwidth_bytes_s"] == 25_000_000
    assert post(path, bandwidth_bytes_s=0, reason="x")[0] == 422
    assert post(path, bandwidth_bytes_s=None, reason="it is not")[1]["bandwidth_bytes_s"] is None
    Cluster.objects.filter(slug="serving").update(role=ClusterRole.TRAINER.value)
    status, refused = post(path, bandwidth_bytes_s=25_000_000, reason="uploads")
    assert (status, refused["field"]) == (422, "bandwidth_bytes_s")
    assert post(path, bandwidth_bytes_s=None, capacity=3, reason="it has none")[0] == 200
