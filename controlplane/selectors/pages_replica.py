"""Reads for the pages: what may be chosen in acts on a replica, and what they would reach."""

from __future__ import annotations

from controlplane.models import Cluster, Event, PolicyVersion, Replica, Run
from controlplane.selectors.answering import answering
from controlplane.selectors.pages_blast import Blast
from controlplane.services.lending import run_problem
from controlplane.states import DesiredSource, EventType, RunState, VersionState
from rl_core.types import ClusterRole

MOST_VERSIONS = 60
MOST_EVENTS = 40
LOOKED_BACK = 100_000  # events of all projects: a replica that nothing happens to costs no more than that
_KINDS = (
    EventType.REPLICA_REGISTERED,
    EventType.REPLICA_CHANGED,
    EventType.REPLICA_STEERED,
    EventType.REPLICA_TARGETED,
    EventType.LOAN_CHANGED,
)


def slots_of(replica: Replica, *, pinned: bool) -> list[str]:
    """The replica's slots, or those of them that are pinned."""
    rows = replica.slots.filter(desired_source=DesiredSource.PINNED) if pinned else replica.slots.all()
    return list(rows.order_by("-slot").values_list("slot", flat=True))


def pinnable(replica: Replica) -> list[PolicyVersion]:
    """Versions that it may be made to hold: of its cluster's model, in good standing, not retired, newest first."""
    rows = PolicyVersion.objects.filter(
        lineage__project=replica.cluster.project_id,
        state=VersionState.COMMITTED,
        quarantined_at__isnull=True,
        retired_at__isnull=True,
    )
    if replica.cluster.model_id is not None:
        rows = rows.filter(lineage__model=replica.cluster.model_id)
    return list(rows.select_related("lineage__run").order_by("-committed_at", "-pk")[:MOST_VERSIONS])


def borrowers(cluster: Cluster) -> list[Run]:
    """Runs that can use a replica of the cluster now, oldest first."""
    runs = Run.objects.filter(project=cluster.project_id, state=RunState.RUNNING, lineage__model=cluster.model_id)
    return [run for run in runs.order_by("created_at") if not run_problem(run)]


def blast_of_replica(replica: Replica, verb: str) -> Blast | None:
    """Of an act that takes something from whoever uses the replica; None for the others."""
    if verb not in ("drain", "pin", "repair"):
        return None
    others = Replica.objects.filter(answering(), cluster=replica.cluster).exclude(pk=replica.pk).count()
    running = replica.metrics.get("running")
    busy = f"{running} request{'' if running == 1 else 's'} under way on it. " if isinstance(running, int) else ""
    if others:
        return Blast(
            note=f"{busy}{others} other replica{'' if others == 1 else 's'} of the cluster answer{'s' * (others == 1)}."
        )
    serves = replica.cluster.role == ClusterRole.SERVING.value
    who = "users are told to come again (503)" if serves else "rollouts go to other clusters, or wait"
    return Blast(note=f"{busy}No other replica of the cluster answers: while this one does not, {who}.")


def events_of_replica(replica: Replica, size: int = MOST_EVENTS) -> list[Event]:
    """What happened to the replica of late, newest first: who did what to it, and why."""
    newest = Event.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    rows = Event.objects.filter(project=replica.cluster.project_id, pk__gt=newest - LOOKED_BACK, type__in=_KINDS)
    return list(rows.filter(data__replica=str(replica.pk)).order_by("-pk")[:size])
