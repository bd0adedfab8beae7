"""A store that is away: the replica goes on with what it has, and comes to the version once the store is back."""

import time

import httpx
import pytest
from s3_server import Fault, running_s3

from controlplane.conductor.fleet import control_client
from controlplane.models import ReplicaSlot, Transfer, WorkUnit
from controlplane.selectors.replica_tokens import Listener, replica_token
from controlplane.services.fleet import slot_target
from controlplane.services.runs import run_create
from controlplane.services.versions import PublishedWeights, version_begin, version_commit
from controlplane.states import DesiredSource, TransferState, WeightSlot, WorkKind, WorkState
from rl_core.delta import Base, publish_delta
from rl_core.engines.protocol import SlotState
from rl_core.models.checkpoint import read_checkpoint
from rl_core.store import open_store
from tests.domain_factories import TESTER, make_spec
from tests.loop_rig import running_rig
from workers import transfer
from workers.base import work_on

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True), pytest.mark.timeout(400)]


def publish(run, folder, store):
    """The version after the run's first one."""
    head = run.lineage.head
    old = read_checkpoint(folder)
    begun = version_begin(lineage=run.lineage, epoch=0, number=1, parent=head, fence=1)
    made = publish_delta(
        store,
        old=old,
        new={name: tensor + 1e-3 for name, tensor in old.items()},
        version=begun.ref,
        base=Base(str(head.ref), head.root, head.manifest_key),
        fence=1,
    )
    weights = PublishedWeights(
        root=made.root,
        manifest_key=made.manifest_key,
        delta_bytes=made.bytes,
        full_bytes=made.full_bytes,
        changed_elements=made.changed_elements,
        elements=made.elements,
    )
    return version_commit(version=begun, fence=1, weights=weights, run=run, actor=TESTER)


def still_serves(replica, root):
    with control_client(replica) as client:
        (slot,) = client.status().slots.values()
    assert (slot.root, slot.state) == (root, SlotState.READY)
    token = replica_token(replica.pk, Listener.INFERENCE, enrolment=None)
    answer = httpx.post(
        f"{replica.inference_url}/v1/generate",
        json={"prompt_token_ids": [5, 6, 7], "sampling": {"max_tokens": 3}},
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return slot


def test_a_transfer_waits_until_the_store_is_back(tmp_path, settings, monkeypatch):
    with running_s3() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        with running_rig(tmp_path, settings, clusters=1, store_url=s3.url()) as rig:
            run = run_create(project=rig.project, name="tiny", spec=make_spec(), actor=TESTER)
            version = publish(run, rig.model.folder, open_store(settings.STORE_URL))
            replica = rig.engines[0].replica
            s3.faults = lambda request: Fault.BUSY
            slot_target(
                replica=replica,
                slot=WeightSlot.DEFAULT,
                version=version,
                source=DesiredSource.TRAINING_HEAD,
                actor=TESTER,
            )
            unit = WorkUnit.objects.get(kind=WorkKind.TRANSFER)
            work_on(unit.pk, transfer.transfer)
            unit.refresh_from_db()
            assert (unit.state, unit.error_code) == (WorkState.QUEUED, "reconcile_failed")
            assert "store_unavailable" in unit.error
            slot = still_serves(replica, rig.model.root)
            assert (slot.error_code, slot.target) == ("store_unavailable", str(version.ref))
            s3.reset()
            deadline = time.monotonic() + 120
            while Transfer.objects.get().state != TransferState.DONE:
                assert time.monotonic() < deadline
                work_on(unit.pk, transfer.transfer)
                time.sleep(0.2)
            still_serves(replica, version.root)
            assert ReplicaSlot.objects.get(replica=replica).current_version_id == version.pk
