"""What a worker needs to know to roll a group out: task, limits, sampling, seeds, and which versions it may use."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec
from django.db.models import Count

from controlplane.models import Loan, PolicyVersion, Replica, ReplicaSlot, Rollout, RolloutGroup, Run, Stage
from controlplane.selectors.answering import answering, answering_slots
from controlplane.selectors.environments import environment_of, remote_named
from controlplane.selectors.task_sets import task_of
from controlplane.states import GroupPurpose, LoanState, RolloutState, VersionState
from rl_core.environments.remote.environment import Remote
from rl_core.environments.session import SeedKey
from rl_core.environments.tasks import Task
from rl_core.errors import EnvironmentFault
from rl_core.session_specs import Limits
from rl_core.specs import RealtimeStage, RlStage, parse_run_spec
from rl_core.types import ClusterRole, SamplingParams, VersionRef


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
    run_id: uuid.UUID | None
    with_routes: bool
    rollouts: tuple[RolloutStart, ...]
    remote: Remote | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One weight slot that can generate, and the version it was last seen to hold.

    `lent_to` is the run that a serving replica's slot is lent to; `enrolment` is the replica's.
    """

    replica_id: uuid.UUID
    cluster: str
    project_id: uuid.UUID
    role: ClusterRole
    url: str
    slot: str
    version: VersionRef | None
    capacity: int
    lent_to: uuid.UUID | None = None
    enrolment: int | None = None

    @property
    def background(self) -> bool:
        """Whether users are answered there, to whom rollouts give way."""
        return self.role is ClusterRole.SERVING


@dataclass(frozen=True, slots=True)
class Need:
    """Which places may answer. Training versions stay on the run's rollout clusters and on what is lent to the run;
    evaluations go anywhere but to what is lent to another.
    """

    plan: RolloutPlan
    min_version: VersionRef | None

    def allows(self, place: Place) -> bool:
        """Whether the place may be asked, as far as is known of it."""
        if place.project_id != self.plan.project_id or place.version is None:
            return False
        if place.lent_to is not None and place.lent_to != self.plan.run_id:
            return False
        if self.plan.exact_version is None and place.role is not ClusterRole.ROLLOUT and place.lent_to is None:
            return False
        if (
            place.role is ClusterRole.ROLLOUT
            and self.plan.cluster_slugs
            and place.cluster not in self.plan.cluster_slugs
        ):
            return False
        return place.version.satisfies(min_version=self.min_version, exact_version=self.plan.exact_version)


def rollout_plan(group: RolloutGroup) -> RolloutPlan:
    """The plan of a group that has begun."""
    version = group.admitted_version
    lineage = version.lineage
    stage_spec, run_spec = _stage_of(group)
    slug = group.task.task_set.environment
    environment = environment_of(lineage.project_id, slug)
    if environment is None:
        raise EnvironmentFault(f"environment {slug!r} is gone: this build and the project know none of that name")
    sampling = stage_spec.sampling if stage_spec else environment.sampling
    evaluates = group.purpose == GroupPurpose.EVALUATION
    if group.evaluation is not None:
        sampling = msgspec.structs.replace(sampling, temperature=group.evaluation.temperature)
    return RolloutPlan(
        group_id=group.pk,
        lineage_id=lineage.pk,
        environment=slug,
        remote=remote_named(lineage.project_id, slug),
        model_folder=lineage.model.folder,
        task=task_of(group.task),
        sampling=sampling,
        limits=stage_spec.limits if stage_spec else environment.limits,
        seed=SeedKey(run_seed=group.seed, group=str(group.draw), attempt=0),
        exact_version=version.ref if evaluates else None,
        max_staleness=stage_spec.max_staleness if stage_spec else 0,
        cluster_slugs=frozenset(run_spec) if run_spec else frozenset(),
        project_id=lineage.project_id,
        run_id=group.run_id,
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
    """Every weight slot of these projects that may be able to generate now. One on its way back from a loan is none."""
    slots = ReplicaSlot.objects.filter(answering_slots(), replica__cluster__project_id__in=project_ids).exclude(
        replica__inference_url=""
    )
    open_loans = Loan.objects.exclude(state=LoanState.RETURNED).filter(replica__cluster__project_id__in=project_ids)
    loans = {(loan.replica_id, loan.slot): loan for loan in open_loans}
    replicas = Replica.objects.filter(answering(), cluster__project_id__in=project_ids).exclude(inference_url="")
    siblings = dict(replicas.values_list("cluster").annotate(n=Count("pk")))
    found = []
    for slot in slots.select_related("replica__cluster", "current_version").order_by("pk"):
        cluster = slot.replica.cluster
        loan = loans.get((slot.replica_id, slot.slot))
        if loan is not None and loan.state != LoanState.LENT:
            continue
        found.append(
            Place(
                replica_id=slot.replica_id,
                cluster=cluster.slug,
                project_id=cluster.project_id,
                role=ClusterRole(cluster.role),
                url=slot.replica.inference_url,
                slot=slot.slot,
                version=slot.current_version.ref if slot.current_version else None,
                capacity=loan.sessions if loan else max(1, cluster.capacity // siblings.get(cluster.pk, 1)),
                lent_to=loan.run_id if loan else None,
                enrolment=slot.replica.enrolment,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a stage says of its rollouts."""

    sampling: SamplingParams
    limits: Limits
    max_staleness: int
    router_replay: bool


def _settings_of(stage: RlStage | RealtimeStage) -> _Settings | None:
    """Those of a simulated stage, or of what a real-time one replays: by exactly the version that its window is of."""
    if not stage.rolls_out:
        return None
    told = stage if isinstance(stage, RlStage) else stage.replay
    staleness = stage.max_staleness if isinstance(stage, RlStage) else 0
    return _Settings(told.sampling, told.limits, staleness, stage.loss.router_replay)


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
