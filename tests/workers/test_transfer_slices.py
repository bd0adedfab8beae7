"""A transfer to a slow replica holds no worker while others wait."""

import pytest

from controlplane.models import Attempt, Replica, Transfer, WorkUnit
from controlplane.services.fleet import slot_target
from controlplane.states import AttemptState, DesiredSource, TransferState, WeightSlot, WorkState
from rl_core.engines.control_client import ControlClient
from rl_core.engines.protocol import EngineStatus, SlotState, SlotStatus
from tests.domain_factories import TESTER, make_cluster, make_run
from tests.simulated_workers import due
from workers import transfer as worker
from workers.base import work_on

pytestmark = pytest.mark.django_db(transaction=True)


class Listener(ControlClient):
    """The control listener of a replica that takes as long as the test likes."""

    def __init__(self, row: Transfer) -> None:
        super().__init__("http://replica", "token")
        self.told = 0
        self.state = SlotState.RECONCILING
        self._ref, self._root = str(row.version.ref), row.version.root

    def set_target(self, **_: object) -> EngineStatus:
        self.told += 1
        return EngineStatus(name="r", slots={})

    def wait_version(self, *_: object, **__: object) -> SlotStatus:
        ready = self.state is SlotState.READY
        return SlotStatus(
            version=self._ref if ready else None, root=self._root if ready else "", state=self.state, target=self._ref
        )


@pytest.fixture
def two(monkeypatch):
    """Two transfers of a cluster, and the listener of the first."""
    run = make_run()
    cluster = make_cluster(run.project, slug="slow", replicas=2)
    for replica in Replica.objects.filter(cluster=cluster).select_related("cluster"):
        slot_target(
            replica=replica, slot=WeightSlot.DEFAULT, version=run.lineage.head, source=DesiredSource.TRAINING_HEAD,
            actor=TESTER,
        )  # fmt: skip
    first, second = Transfer.objects.filter(replica__cluster=cluster).order_by("pk")
    listener = Listener(first)
    monkeypatch.setattr(worker, "control_client", lambda _: listener)
    monkeypatch.setattr(worker, "_SLICE_S", 0.0)
    yield WorkUnit.objects.get(ref=first.pk), WorkUnit.objects.get(ref=second.pk), listener
    listener.close()


def state_of(unit):
    unit.refresh_from_db()
    transfer = Transfer.objects.get(pk=unit.ref)
    attempts = list(Attempt.objects.filter(unit=unit).order_by("number").values_list("state", flat=True))
    return unit.state, transfer.state, attempts


def test_it_makes_room_and_goes_on_where_it_was(two):
    first, second, listener = two
    for looks in (1, 2, 3):
        due(first)
        work_on(first.pk, worker.transfer)
        assert state_of(first) == (WorkState.QUEUED, TransferState.RUNNING, [AttemptState.YIELDED] * looks)
    assert (listener.told, first.failures) == (1, 0)
    listener.state = SlotState.READY
    due(first)
    work_on(first.pk, worker.transfer)
    assert state_of(first)[:2] == (WorkState.DONE, TransferState.DONE)
    assert listener.told == 1
    assert state_of(second)[0] == WorkState.QUEUED


def test_after_a_failure_the_replica_is_told_again(two):
    first, _, listener = two
    work_on(first.pk, worker.transfer)
    listener.state = SlotState.POISONED
    due(first)
    work_on(first.pk, worker.transfer)
    assert state_of(first)[2] == [AttemptState.YIELDED, AttemptState.FAILED]
    listener.state = SlotState.READY
    due(first)
    work_on(first.pk, worker.transfer)
    assert (state_of(first)[1], listener.told) == (TransferState.DONE, 2)


def test_it_stays_while_nobody_waits(two, monkeypatch):
    first, second, listener = two
    WorkUnit.objects.filter(pk=second.pk).update(state=WorkState.CANCELLED)
    looks = iter([SlotState.RECONCILING] * 3 + [SlotState.READY])
    wait = listener.wait_version
    monkeypatch.setattr(listener, "wait_version", lambda *a, **k: (setattr(listener, "state", next(looks)), wait())[1])
    work_on(first.pk, worker.transfer)
    assert state_of(first) == (WorkState.DONE, TransferState.DONE, [AttemptState.SUCCEEDED])
