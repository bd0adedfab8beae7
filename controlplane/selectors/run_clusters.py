"""Which rollout clusters a run uses, and which other run has them now."""

from __future__ import annotations

from django.db.models import Sum

from controlplane.models import Cluster, Loan, Run
from controlplane.states import LoanState, RunState
from rl_core.specs import RunSpec, parse_run_spec
from rl_core.types import ClusterRole

HOLDING = (RunState.RUNNING, RunState.PAUSED)


def spec_of(run: Run) -> RunSpec:
    """The run's resolved spec."""
    return parse_run_spec(run.spec)


def rollout_clusters(run: Run, spec: RunSpec) -> tuple[Cluster, ...]:
    """The rollout clusters that the spec names, or all of the project's when it names none; none without rollouts."""
    if not any(stage.rolls_out for stage in spec.stages):
        return ()
    clusters = Cluster.objects.filter(project_id=run.project_id, role=ClusterRole.ROLLOUT.value)
    if spec.rollout_clusters:
        clusters = clusters.filter(slug__in=spec.rollout_clusters)
    return tuple(clusters.order_by("slug"))


def sessions_lent(run: Run) -> int:
    """Sessions that serving replicas lent to the run may roll out at once."""
    lent = Loan.objects.filter(run=run, state=LoanState.LENT)
    return lent.aggregate(sessions=Sum("sessions"))["sessions"] or 0


def run_holding_clusters_of(run: Run) -> Run | None:
    """The oldest other run that is running or paused on any of the run's clusters."""
    mine = {cluster.pk for cluster in rollout_clusters(run, spec_of(run))}
    others = Run.objects.filter(project_id=run.project_id, state__in=HOLDING).exclude(pk=run.pk).order_by("created_at")
    for other in others if mine else ():
        if mine & {cluster.pk for cluster in rollout_clusters(other, spec_of(other))}:
            return other
    return None
