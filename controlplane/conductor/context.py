"""What a decision about a run's stage has before it."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import Cluster, PolicyVersion, Run, Stage
from rl_core.specs import RunSpec, parse_run_spec
from rl_core.types import ClusterRole


@dataclass(frozen=True, slots=True)
class StageContext:
    """A stage of a run, the head of its lineage, and the clusters whose engines roll out for it."""

    run: Run
    stage: Stage
    spec: RunSpec
    head: PolicyVersion
    clusters: tuple[Cluster, ...]


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
