"""A fleet as its page shows it: three regions, one replica poisoned, one taken out, one lent, weights on their way.

Rows come from services; only where a worker or an engine would tell something, this module tells it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.db.models import F, Value
from django.db.models.functions import Now

from controlplane.models import (
    Cluster,
    LendingPolicy,
    MetricPoint,
    PolicyVersion,
    Publication,
    Replica,
    ReplicaSlot,
    Rollout,
    Run,
    Step,
    Transfer,
)
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_configure, cluster_create, replica_register, slot_target
from controlplane.services.lending import lending_allow, lending_set, replica_lend
from controlplane.services.metrics import MISMATCH_OF, metrics_record
from controlplane.services.steering import replica_drain
from controlplane.services.transfers import transfer_begin
from controlplane.services.work import Claim
from controlplane.states import DesiredSource, PublicationKind, ReplicaState, TransferState, WeightSlot, WorkKind
from rl_core.types import ClusterRole
from tests.factories import FULL_BYTES, Workspace, digest, furnish, make_workspace
from tests.playing import claim_of, play, start_run

STEP_S = 40


@dataclass
class FleetStory:
    """A furnished project whose run has made steps. `moving` is under way under `claim`, `lent` is lent to the run."""

    workspace: Workspace
    run: Run
    serving: Cluster
    moving: Transfer
    claim: Claim
    lent: Replica
    poisoned: Replica
    drained: Replica

    @property
    def head(self) -> PolicyVersion:
        """The run's newest version."""
        run = Run.objects.select_related("lineage__head").get(pk=self.run.pk)
        assert run.lineage.head is not None
        return run.lineage.head


def fleet_story(*, steps: int = 6, hostile: str = "", workspace: Workspace | None = None) -> FleetStory:
    """The whole; `hostile` stands wherever an engine, a worker or a person could write."""
    workspace = workspace or furnish(make_workspace(), train=40)
    for cluster, device, price in zip(workspace.clusters, ("H200", "MI300X"), (3.5, 2.8), strict=True):
        cluster_configure(
            cluster=cluster,
            actor=SYSTEM,
            reason="priced",
            device=device + hostile[:40],
            devices=8,
            dollars_device_hour=price,
        )
    run = start_run(workspace, name="Word problems" + hostile, steps=steps + 4)
    play(run, steps)
    _spread(run)
    publish_more(run)
    serving = _serving(workspace, run)
    poisoned, drained = _tokyo(workspace, run, hostile)
    lending_allow(project=workspace.project, allowed=True, actor=SYSTEM, reason="nights are quiet")
    lent = serving.replicas.get(name="engine-1")
    replica_lend(replica=lent, run=run, actor=SYSTEM, reason="a big evaluation tonight" + hostile)
    policy = {"windows": [{"days": [0, 1, 2, 3, 4], "start": "22:00", "end": "06:00"}], "timezone": "Europe/Berlin"}
    load = {"source": "gateway", "lend_below": 2.0, "return_above": 6.0}
    lending_set(cluster=serving, spec={**policy, **load}, enabled=True, actor=SYSTEM, reason="nights are quiet")
    note = "waits for 22:00 Europe/Berlin; the load has been low for 4 min"
    LendingPolicy.objects.filter(cluster=serving).update(load=1.4, load_at=Now(), note=note + hostile)
    claim = claim_of(WorkKind.TRANSFER, _send_head(poisoned.cluster, "engine-3", run).pk)
    moving = transfer_begin(claim)
    assert moving is not None
    tell_progress(moving, share=0.4)
    return FleetStory(workspace, run, serving, moving, claim, lent, poisoned, drained)


def tell_progress(transfer: Transfer, *, share: float, phase: str = "fetch") -> None:
    """What the transfer worker writes down of what the replica told it."""
    total = 48_000_000
    rate = 3_200_000.0
    Transfer.objects.filter(pk=transfer.pk).update(
        phase=phase,
        done_bytes=round(total * share),
        total_bytes=total,
        bytes_per_s=rate,
        remaining_s=total * (1 - share) / rate,
    )


def publish_more(run: Run) -> None:
    """A snapshot in the middle of the chain and two skip-deltas over it."""
    versions = list(PolicyVersion.objects.filter(lineage=run.lineage).order_by("epoch", "number"))
    if len(versions) < 5:
        return
    for kind, start, end, size in (
        (PublicationKind.SNAPSHOT, None, 3, FULL_BYTES * 0.7),
        (PublicationKind.SKIP, 0, 4, 4_100_000),
        (PublicationKind.SKIP, 2, len(versions) - 1, 3_300_000),
    ):
        Publication.objects.create(
            version=versions[end],
            base_version=None if start is None else versions[start],
            kind=kind,
            root=versions[end].root,
            base_root="" if start is None else versions[start].root,
            manifest_key=f"derived/{kind}-{end}/manifest.json",
            bytes=round(size),
            full_bytes=FULL_BYTES,
            published_at=Now(),
        )


def _spread(run: Run) -> None:
    """Steps of a played run are published in one moment: put time between them, and into what they measured."""
    steps = list(run.steps.filter(published_at__isnull=False).order_by("number"))
    for back, step in enumerate(reversed(steps)):
        gap = Value(timedelta(seconds=STEP_S * back))
        Step.objects.filter(pk=step.pk).update(published_at=Now() - gap)
        Rollout.objects.filter(group__step=step).update(finished_at=Now() - gap - Value(timedelta(seconds=STEP_S // 2)))
        clusters = ("rollout-east", "rollout-west")
        values = {f"{MISMATCH_OF}{slug}": 3e-4 * (1 + place) for place, slug in enumerate(clusters)}
        metrics_record(run=run, values=values, step=step.number, announce=False)
    _alternate(run)
    MetricPoint.objects.filter(run=run).update(at=F("at") - Value(timedelta(seconds=1)))


def _alternate(run: Run) -> None:
    """Let both clusters have sampled: a played rollout names the first replica there is."""
    replicas = list(Replica.objects.filter(cluster__project=run.project).order_by("cluster__slug"))
    for number, rollout in enumerate(Rollout.objects.filter(group__run=run).order_by("pk")):
        Rollout.objects.filter(pk=rollout.pk).update(replica=replicas[number % len(replicas)])


def _serving(workspace: Workspace, run: Run) -> Cluster:
    cluster = _cluster(workspace, run, "serving-eu", ClusterRole.SERVING, "eu-central", replicas=2, slots=2)
    promoted = PolicyVersion.objects.filter(lineage=run.lineage).order_by("epoch", "number")[1]
    for replica in cluster.replicas.all():
        for slot in replica.slots.all():
            _hold(slot, promoted, DesiredSource.PROMOTED)
    return cluster


def _tokyo(workspace: Workspace, run: Run, hostile: str) -> tuple[Replica, Replica]:
    cluster = _cluster(workspace, run, "rollout-tokyo", ClusterRole.ROLLOUT, "ap-northeast", replicas=3, slots=1)
    versions = list(PolicyVersion.objects.filter(lineage=run.lineage).order_by("-epoch", "-number"))
    poisoned, drained, late = cluster.replicas.order_by("name")
    for replica, version in ((poisoned, versions[0]), (drained, versions[0]), (late, versions[-1])):
        _hold(replica.slots.get(), version, DesiredSource.TRAINING_HEAD)
    fault = f"slot default says root {digest('torn')[:16]}… for a version whose root is {versions[0].root[:16]}…"
    Replica.objects.filter(pk=poisoned.pk).update(
        state=ReplicaState.POISONED, error=fault + hostile, repairs=2, repaired_at=Now() - Value(timedelta(seconds=40))
    )
    replica_drain(replica=drained, actor=SYSTEM, reason="a fan is loud" + hostile)
    return poisoned, drained


def _cluster(
    workspace: Workspace, run: Run, slug: str, role: ClusterRole, region: str, *, replicas: int, slots: int
) -> Cluster:
    cluster = cluster_create(
        project=workspace.project,
        slug=slug,
        role=role,
        region=region,
        capacity=64,
        model=run.lineage.model,
        actor=SYSTEM,
    )
    for number in range(1, replicas + 1):
        replica = replica_register(
            cluster=cluster,
            name=f"engine-{number}",
            inference_url=f"http://127.0.0.1:{number}",
            control_url=f"http://127.0.0.1:{number + 100}",
            weight_slots=slots,
            actor=SYSTEM,
        )
        metrics = {"running": 2, "waiting": 0, "tokens_per_s": 310.0, "idle_share": 0.2}
        Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY, seen_at=Now(), metrics=metrics)
    return cluster


def _hold(slot: ReplicaSlot, version: PolicyVersion, source: DesiredSource) -> None:
    ReplicaSlot.objects.filter(pk=slot.pk).update(
        desired_version=version,
        desired_source=source,
        desired_at=Now(),
        current_version=version,
        current_root=version.root,
        reported_at=Now(),
    )


def _send_head(cluster: Cluster, name: str, run: Run) -> Transfer:
    run.lineage.refresh_from_db()
    transfer = slot_target(
        replica=cluster.replicas.get(name=name),
        slot=WeightSlot.DEFAULT,
        version=run.lineage.head,
        source=DesiredSource.TRAINING_HEAD,
        actor=SYSTEM,
    )
    assert transfer is not None
    assert transfer.state == TransferState.PENDING
    return transfer
