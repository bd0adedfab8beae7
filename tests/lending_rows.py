"""A serving cluster with users and a run of its model that rolls out, for tests of lending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models.functions import Now

from controlplane.models import Cluster, Lane, Loan, PolicyVersion, Project, Replica, ReplicaSlot, Run, Transfer
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.lanes import lane_create
from controlplane.services.lending import lending_set
from controlplane.states import ReplicaState, RunState, StageState, TransferState, VersionState
from rl_core.types import ClusterRole
from tests.domain_factories import TESTER, make_run

ALWAYS: dict[str, Any] = {"windows": [{"days": [0, 1, 2, 3, 4, 5, 6]}], "keep": 0}
BY_LOAD: dict[str, Any] = {
    "source": "gateway", "lend_below": 1.0, "return_above": 5.0, "settle_s": 60.0, "window_s": 10.0, "keep": 1,
}  # fmt: skip


@dataclass
class LendingWorld:
    """`replicas` answer from their default slot; `run` is running and has a head."""

    project: Project
    cluster: Cluster
    lane: Lane
    replicas: list[Replica]
    run: Run

    @property
    def replica(self) -> Replica:
        return self.replicas[0]

    def slot(self, name: str = "candidate", replica: Replica | None = None) -> ReplicaSlot:
        rows = ReplicaSlot.objects.select_related("desired_version", "current_version")
        return rows.get(replica=replica or self.replica, slot=name)

    def loan(self) -> Loan:
        return Loan.objects.latest("pk")

    def arrive(self, name: str = "candidate", replica: Replica | None = None) -> None:
        """The slot's transfer is done: it holds what it was told to hold."""
        slot = self.slot(name, replica)
        on_its_way = Transfer.objects.filter(replica=slot.replica_id, slot=name, state__in=["pending", "running"])
        on_its_way.update(state=TransferState.DONE, finished_at=Now())
        ReplicaSlot.objects.filter(pk=slot.pk).update(current_version=slot.desired_version, reported_at=Now())

    def next_head(self) -> PolicyVersion:
        """A further version of the run."""
        head = self.run.lineage.head
        version = PolicyVersion.objects.create(
            lineage=self.run.lineage, epoch=0, number=head.number + 1, state=VersionState.COMMITTED, parent=head,
            root=f"{head.number + 1:064d}", manifest_key="m", committed_at=Now(),
        )  # fmt: skip
        type(self.run.lineage).objects.filter(pk=self.run.lineage_id).update(head=version)
        self.run.lineage.refresh_from_db()
        return version

    def policy(self, **spec: Any) -> None:
        """Set the cluster's policy."""
        lending_set(cluster=self.cluster, spec=spec, enabled=True, actor=TESTER, reason="nights are quiet")


def lending_world(*, replicas: int = 2, weight_slots: int = 2, allowed: bool = True) -> LendingWorld:
    """Make the rows through the services."""
    run = make_run()
    project, model = run.project, run.lineage.model
    Project.objects.filter(pk=project.pk).update(lending_allowed=allowed)
    cluster = cluster_create(
        project=project, slug="serving", role=ClusterRole.SERVING, region="here", capacity=8, model=model, actor=TESTER
    )
    lane = lane_create(project=project, slug="assistant", cluster=cluster, model=model, actor=TESTER)
    lane.refresh_from_db()
    made = []
    for number in range(replicas):
        replica = replica_register(
            cluster=cluster, name=f"serving-{number}", inference_url="http://127.0.0.1:1",
            control_url="http://127.0.0.1:2", weight_slots=weight_slots, actor=TESTER,
        )  # fmt: skip
        Replica.objects.filter(pk=replica.pk).update(
            state=ReplicaState.READY, metrics={"running": 0, "waiting": 0, "slots": {}}
        )
        ReplicaSlot.objects.filter(replica=replica, slot="default").update(
            desired_version=lane.promoted_version, current_version=lane.promoted_version, desired_source="promoted"
        )
        made.append(Replica.objects.select_related("cluster").get(pk=replica.pk))
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    run.stages.update(state=StageState.RUNNING)
    run.refresh_from_db()
    return LendingWorld(project, cluster, lane, made, run)
