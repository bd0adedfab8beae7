"""What a worker needs to know to roll a group out: task, limits, sampling, seeds, and which versions it may use."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec

from controlplane.models import PolicyVersion, ReplicaSlot, Rollout, RolloutGroup, Run, Stage
from controlplane.states import GroupPurpose, ReplicaState, RolloutState, VersionState
from rl_core.environments.harness import Limits, SeedKey
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.environments.tasks import Task
from rl_core.specs import RealtimeStage, RlStage, parse_run_spec
from rl_core.types import ClusterRole, SamplingParams, Split, VersionRef


@dataclass(frozen=True, slots=True)
class RolloutStart:
    """One attempt of a group: where to go on from (`session_key`, empty at the beginning), or that it has ended."""

    rollout_id: uuid.UUID
    attempt: int
    session_key: str
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A group, ready to be rolled out. `exact_version` is set for evaluations, else `max_staleness` bounds."""

    group_id: uuid.UUID
    lineage_id: uuid.UUID
    environment: str
    model_folder: str
    task: Task
    sampling: SamplingParams
    limits: Limits
    seed: SeedKey
    exact_version: VersionRef | None
    max_staleness: int
    cluster_slugs: frozenset[str]
    project_id: uuid.UUID
    with_routes: bool
    rollouts: tuple[RolloutStart, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One weight slot that can generate, and the version it was last seen to hold."""

    replica_id: uuid.UUID
    cluster: str
    project_id: uuid.UUID
    role: ClusterRole
    url: str
    slot: str
    version: VersionRef | None
    capacity: int


def rollout_plan(group: RolloutGroup) -> RolloutPlan:
    """The plan of a group that has begun."""
    version = group.admitted_version
    lineage = version.lineage
    stage_spec, run_spec = _stage_of(group)
    environment = ENVIRONMENTS[group.task.task_set.environment]
    sampling = stage_spec.sampling if stage_spec else environment.sampling
    evaluates = group.purpose == GroupPurpose.EVALUATION
    if group.evaluation is not None:
        sampling = msgspec.structs.replace(sampling, temperature=group.evaluation.temperature)
    return RolloutPlan(
        group_id=group.pk,
        lineage_id=lineage.pk,
        environment=environment.slug,
        model_folder=lineage.model.folder,
        task=Task(
            id=group.task.key,
            split=Split(group.task.split),
            input=group.task.input,
            reference=group.task.reference,
        ),
        sampling=sampling,
        limits=Limits(
            max_turns=stage_spec.max_turns if stage_spec else environment.max_turns,
            max_context_tokens=stage_spec.max_context_tokens if stage_spec else Limits().max_context_tokens,
        ),
        seed=SeedKey(run_seed=group.seed, group=str(group.position), attempt=0),
        exact_version=version.ref if evaluates else None,
        max_staleness=stage_spec.max_staleness if stage_spec else 0,
        cluster_slugs=frozenset(run_spec) if run_spec else frozenset(),
        project_id=lineage.project_id,
        with_routes=not evaluates and bool(stage_spec and stage_spec.router_replay),
        rollouts=tuple(
            RolloutStart(row.pk, row.attempt, row.session_key, row.state != RolloutState.RUNNING)
            for row in Rollout.objects.filter(group=group).order_by("attempt")
        ),
    )


def oldest_allowed(lineage_id: uuid.UUID, max_staleness: int) -> VersionRef | None:
    """The oldest committed version that a training rollout may still use."""
    committed = PolicyVersion.objects.filter(lineage_id=lineage_id, state=VersionState.COMMITTED)
    head = committed.order_by("-epoch", "-number").first()
    if head is None:
        return None
    allowed = committed.filter(number__gte=head.number - max_staleness).order_by("epoch", "number").first()
    return allowed.ref if allowed else head.ref


def places(project_ids: set[uuid.UUID]) -> list[Place]:
    """Every weight slot of these projects that may be able to generate now."""
    slots = ReplicaSlot.objects.filter(
        replica__cluster__project_id__in=project_ids,
        replica__state__in=[ReplicaState.READY, ReplicaState.RECONCILING],
    ).exclude(replica__inference_url="")
    found = []
    for slot in slots.select_related("replica__cluster", "current_version").order_by("pk"):
        cluster = slot.replica.cluster
        siblings = cluster.replicas.count()
        found.append(
            Place(
                replica_id=slot.replica_id,
                cluster=cluster.slug,
                project_id=cluster.project_id,
                role=ClusterRole(cluster.role),
                url=slot.replica.inference_url,
                slot=slot.slot,
                version=slot.current_version.ref if slot.current_version else None,
                capacity=max(1, cluster.capacity // max(1, siblings)),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a stage says of its rollouts."""

    sampling: SamplingParams
    max_turns: int
    max_context_tokens: int
    max_staleness: int
    router_replay: bool


def _settings_of(stage: RlStage | RealtimeStage) -> _Settings | None:
    """Those of a simulated stage, or of what a real-time one replays: by exactly the version that its window is of."""
    if not stage.rolls_out:
        return None
    told = stage if isinstance(stage, RlStage) else stage.replay
    staleness = stage.max_staleness if isinstance(stage, RlStage) else 0
    return _Settings(told.sampling, told.max_turns, told.max_context_tokens, staleness, stage.loss.router_replay)


def _stage_of(group: RolloutGroup) -> tuple[_Settings | None, tuple[str, ...]]:
    """The settings that the group follows, and the clusters that the run's spec names.

    An evaluation follows the stage of its run that has the same task set; without one, the environment's defaults.
    """
    run: Run | None = group.run
    if run is None:
        return None, ()
    spec = parse_run_spec(run.spec)
    stages = Stage.objects.filter(run=run)
    stage = group.stage or stages.filter(task_set=group.task.task_set_id).order_by("position").first()
    return (_settings_of(spec.stages[stage.position]) if stage else None), spec.rollout_clusters
