"""What a decision about a run's stage has before it."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import Cluster, PolicyVersion, Run, Stage
from rl_core.specs import RunSpec


@dataclass(frozen=True, slots=True)
class StageContext:
    """A stage of a run, the head of its lineage, and the clusters whose engines roll out for it."""

    run: Run
    stage: Stage
    spec: RunSpec
    head: PolicyVersion
    clusters: tuple[Cluster, ...]
