"""Serving capacity for rollouts: a cluster's policy, whom it lends to, and what is lent, by a person or by policy.

A lent replica goes on answering users from the slot that it answers from; its spare slot takes the run's training
head. Users' requests name the version and the slot that they want, rollouts name their lineage: neither can ever be
answered from the other's slot. Within the engine rollouts give way to users.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q, Value
from django.db.models.functions import Now

from controlplane.errors import Conflict, Invalid
from controlplane.models import Cluster, Lane, LendingPolicy, Loan, Project, Release, Replica, ReplicaSlot, Run
from controlplane.models import ServedVersion as Served
from controlplane.selectors.answering import answering, answering_slots
from controlplane.services.events import Actor, conductor_nudge, event_append, project_topic, require_reason
from controlplane.services.fleet import slot_target
from controlplane.services.loans import DEFAULT_SESSIONS, loan_call_back, loan_open_of, loan_record
from controlplane.services.locks import replica_locked
from controlplane.services.releases import IN_FLIGHT
from controlplane.states import Arm, DesiredSource, EventType, LoanState, RunState, StageState, WeightSlot
from rl_core.errors import SpecError
from rl_core.lending import lending_parse, lending_resolve
from rl_core.specs import parse_run_spec
from rl_core.types import ClusterRole

# For so long the version that answered before stays loaded, so that a rollback is instant.
ROLLBACK_KEPT_S = 3600.0
_ASKED = ("source", "prometheus_url", "prometheus_query", "window_s")  # how a load is asked for


@transaction.atomic
def lending_set(*, cluster: Cluster, spec: dict[str, Any], enabled: bool, actor: Actor, reason: str) -> LendingPolicy:
    """Set when a serving cluster lends. Turned off, or changed so that it would not lend now, it calls back what it
    lent by policy. What is known of the load goes on counting while it is asked in the same way.

    Raises: Invalid, naming the key, and for a cluster that serves nobody.
    """
    require_reason(reason, "say why the policy changes")
    if cluster.role != ClusterRole.SERVING.value:
        raise Invalid(f"cluster {cluster.slug} is for {cluster.role}: only serving clusters lend", "cluster")
    try:
        resolved = lending_resolve(lending_parse(spec))
    except SpecError as error:
        raise Invalid(str(error), "spec") from error
    before = LendingPolicy.objects.select_for_update(no_key=True).filter(cluster=cluster).first()
    policy, _ = LendingPolicy.objects.update_or_create(
        cluster=cluster, defaults={"spec": resolved, "enabled": enabled, "note": "", **_load_since(before, resolved)}
    )
    policy.refresh_from_db()
    _record(cluster, actor, "policy set" if enabled else "policy turned off", reason)
    conductor_nudge()
    return policy


def _load_since(before: LendingPolicy | None, spec: dict[str, Any]) -> dict[str, Any]:
    """What of a policy's load begins anew with this spec. One that is not asked for yet has from now on to be known."""
    if before is None or not before.enabled or any(before.spec.get(key) != spec.get(key) for key in _ASKED):
        return {"load": None, "load_at": Now(), "load_error": "", "quiet_since": None}
    return {} if before.spec.get("lend_below") == spec.get("lend_below") else {"quiet_since": None}


@transaction.atomic
def lending_allow(*, project: Project, allowed: bool, actor: Actor, reason: str) -> Project:
    """Whether the project's runs may roll out on replicas of its serving clusters at all."""
    require_reason(reason, "say why this changes")
    Project.objects.filter(pk=project.pk).update(lending_allowed=allowed)
    event_append(
        project_id=project.pk,
        topic=project_topic(project.pk),
        event_type=EventType.LENDING_CHANGED,
        actor=actor,
        reason=reason,
        data={"cluster": "all clusters", "change": "allowed" if allowed else "forbidden"},
    )
    conductor_nudge()
    project.refresh_from_db()
    return project


@transaction.atomic
def replica_lend(*, replica: Replica, run: Run, actor: Actor, reason: str, by_hand: bool = True) -> Loan:
    """Lend a replica to a run's rollouts: its spare slot takes the run's training head. What is lent by hand stays so
    until it is called back: by a person, by rising load, by a release, or with the run's end.

    Raises: Conflict, saying what stands against it; Invalid without a reason.
    """
    require_reason(reason, "say why the replica is lent")
    row = replica_locked(replica.pk)
    problem = lending_problem(row.cluster) or _borrowing_problem(row.cluster, run)
    if problem:
        raise Conflict(problem)
    if not Replica.objects.filter(answering(), pk=row.pk).exists():
        raise Conflict(f"replica {row.name} is {row.state}: it has nothing to lend")
    if loan_open_of(row.pk) is not None:
        raise Conflict(f"replica {row.name} is lent already")
    slot, problem = spare_slot(row)
    if slot is None:
        raise Conflict(f"replica {row.name} has no slot to lend: {problem}")
    policy = LendingPolicy.objects.filter(cluster=row.cluster).first()
    loan = Loan.objects.create(
        replica=row,
        run=run,
        slot=slot.slot,
        sessions=lending_parse(policy.spec).sessions if policy else DEFAULT_SESSIONS,
        by_hand=by_hand,
        reason=reason[:500],
        before_version_id=slot.desired_version_id,
        before_source=slot.desired_source,
    )
    loan.refresh_from_db()
    loan_record(loan, actor=actor, reason=reason)
    loan_follow(loan, actor=actor)
    return loan


@transaction.atomic
def replica_return(*, replica: Replica, actor: Actor, reason: str) -> Loan:
    """Call a lent replica back. Raises: Conflict when it is not lent; Invalid without a reason."""
    require_reason(reason, "say why the replica comes back")
    # The policy has to see it quiet again for its whole time before it lends anew.
    LendingPolicy.objects.filter(cluster=replica.cluster_id).update(quiet_since=None)
    loan = loan_call_back(replica_id=replica.pk, actor=actor, reason=reason)
    if loan is None:
        raise Conflict(f"replica {replica.name} is not lent")
    return loan


def loan_follow(loan: Loan, *, actor: Actor) -> bool:
    """Tell the lent slot to hold the run's training head; whether it was told something new."""
    head = loan.run.lineage.head
    slot = ReplicaSlot.objects.get(replica=loan.replica_id, slot=loan.slot)
    if head is None or (slot.desired_version_id == head.pk and slot.desired_source == DesiredSource.LENT):
        return False
    slot_target(
        replica=loan.replica,
        slot=WeightSlot(loan.slot),
        version=head,
        source=DesiredSource.LENT,
        actor=actor,
        reason=f"lent to run {loan.run.name}",
    )
    return True


def lending_problem(cluster: Cluster) -> str:
    """Why nothing of the cluster may be lent to anybody now; empty when it may."""
    if cluster.role != ClusterRole.SERVING.value:
        return f"cluster {cluster.slug} is for {cluster.role}: only serving clusters lend"
    if not Project.objects.filter(pk=cluster.project_id, lending_allowed=True).exists():
        return "the project does not allow rollouts on replicas that serve users"
    release = Release.objects.filter(lane__cluster=cluster, state__in=IN_FLIGHT).select_related("lane").first()
    if release is not None:
        return f"a release of lane {release.lane.slug} is {release.state}: it needs the spare slots"
    lane = Lane.objects.filter(cluster=cluster, rollback_to__isnull=False).first()
    return f"lane {lane.slug} is being rolled back: it needs the spare slots" if lane else ""


def run_that_borrows(cluster: Cluster) -> Run | None:
    """The run that a cluster lends to: the oldest that may and can use it."""
    runs = Run.objects.filter(project=cluster.project_id, state=RunState.RUNNING).order_by("created_at")
    fitting = (run for run in runs.select_related("lineage") if not _borrowing_problem(cluster, run))
    return next(fitting, None)


def run_problem(run: Run) -> str:
    """Why a run has no use for replicas that are lent to it; empty when it has."""
    if run.state != RunState.RUNNING:
        return f"run {run.name} is {run.state}"
    stage = run.stages.exclude(state=StageState.COMPLETED).order_by("position").first()
    if stage is None or not parse_run_spec(run.spec).stages[stage.position].rolls_out:
        return f"run {run.name} rolls nothing out now"
    return ""


def spare_slot(replica: Replica) -> tuple[ReplicaSlot | None, str]:
    """A slot of the replica that neither users nor a rollback in the next hour need; else why there is none."""
    slots = list(replica.slots.order_by("slot"))
    if len(slots) < 2:
        return None, "it has one slot, which its users are answered from"
    promoted = _promoted(replica.cluster_id)
    well = [slot for slot in slots if not slot.fault]
    if promoted - {slot.current_version_id for slot in well}:
        return None, "it does not hold what its users are answered with"
    recent = Q(until__isnull=True) | Q(until__gt=Now() - Value(timedelta(seconds=ROLLBACK_KEPT_S)))
    earlier = set(
        Served.objects.filter(recent, lane__cluster=replica.cluster_id, arm=Arm.PROMOTED).values_list(
            "version", flat=True
        )
    )
    # One slot is kept for each version that answers; more copies of it are spare.
    kept: dict[Any, ReplicaSlot] = {}
    for slot in sorted(well, key=lambda one: one.slot != WeightSlot.DEFAULT):
        if slot.current_version_id in promoted:
            kept.setdefault(slot.current_version_id, slot)
    spare = [slot for slot in well if slot not in kept.values()]
    free = [slot for slot in spare if slot.desired_source not in (DesiredSource.PINNED, DesiredSource.EVALUATION)]
    lendable = [slot for slot in free if slot.desired_version_id not in earlier - promoted]
    if lendable:
        return lendable[0], ""
    if free:
        return None, "it holds the version that answered before, for a rollback"
    return None, "its other slot is pinned" if spare else "each of its slots answers users"


def _borrowing_problem(cluster: Cluster, run: Run) -> str:
    if run.project_id != cluster.project_id or run.lineage.model_id != cluster.model_id:
        return f"run {run.name} trains another model than cluster {cluster.slug} serves"
    return run_problem(run)


def _record(cluster: Cluster, actor: Actor, change: str, reason: str) -> None:
    event_append(
        project_id=cluster.project_id,
        topic=project_topic(cluster.project_id),
        event_type=EventType.LENDING_CHANGED,
        actor=actor,
        reason=reason,
        data={"cluster": cluster.slug, "change": change},
    )


def answering_unlent(cluster: Cluster) -> int:
    """How many replicas can answer users, with what users are answered with, and are not lent."""
    lent = Loan.objects.exclude(state=LoanState.RETURNED).filter(replica__cluster=cluster)
    slots = ReplicaSlot.objects.filter(answering_slots(), replica__cluster=cluster)
    promoted = _promoted(cluster.pk)
    if promoted:
        slots = slots.filter(current_version__in=promoted)
    return slots.exclude(replica__in=lent.values("replica")).values("replica").distinct().count()


def _promoted(cluster_id: UUID) -> set[UUID]:
    lanes = Lane.objects.filter(cluster=cluster_id, promoted_version__isnull=False)
    return set(lanes.values_list("promoted_version", flat=True))
