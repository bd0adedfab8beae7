"""Releases: a candidate is gated against the incumbent, approved by people, promoted, and rolled back if need be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Now

from controlplane.errors import Conflict, Forbidden, Invalid, StaleRevision
from controlplane.models import (
    Approval,
    Evaluation,
    Lane,
    PolicyVersion,
    Release,
    ReplicaSlot,
    RubricVersion,
    Run,
    TaskSet,
    User,
)
from controlplane.selectors.statistics import paired_interval
from controlplane.services.evaluations import evaluation_request
from controlplane.services.events import Actor, conductor_nudge, event_append, lane_topic
from controlplane.services.feedback import feedback_quarantine
from controlplane.services.fleet import slot_target
from controlplane.services.lanes import lane_point
from controlplane.services.transitions import transition
from controlplane.states import (
    DesiredSource,
    EvaluationState,
    EventType,
    ReleaseState,
    VersionState,
    WeightSlot,
)
from rl_core.specs import RealtimeStage, RlStage


def release_propose(
    *, lane: Lane, version: PolicyVersion, run: Run | None, proposer: User | None, actor: Actor, reason: str
) -> Release:
    """Put a committed version on its way to the lane's users.

    Raises: Invalid for a version that is not committed, quarantined, of another model or already promoted; Conflict
    while another release of the lane is in flight.
    """
    if version.state != VersionState.COMMITTED or version.quarantined_at is not None:
        raise Invalid(f"version {version} is not committed, or is quarantined", field="version")
    if version.lineage.model_id != lane.model_id:
        raise Invalid("the version descends from another model than the lane serves", field="version")
    if version.id == lane.promoted_version_id:
        raise Invalid("the version is the promoted one already", field="version")
    if not reason.strip():
        raise Invalid("say why: a release needs a reason", field="reason")
    try:
        with transaction.atomic():
            release = Release.objects.create(
                lane=lane,
                version=version,
                incumbent=lane.promoted_version,
                run=run,
                proposer=proposer,
                reason=reason,
            )
            _record(release, actor=actor, reason=reason)
            conductor_nudge()
    except IntegrityError as error:
        raise Conflict(f"lane {lane.slug} has a release in flight already; end it first") from error
    return release


def release_advance(*, release: Release, actor: Actor) -> Release:
    """Take the release's next automatic step: load the candidate beside the incumbent, evaluate both, compare.

    Called by the conductor on every tick; does nothing while it waits for a transfer, an evaluation or a person.
    """
    if release.state == ReleaseState.PENDING:
        return _begin_gating(release, actor=actor)
    if release.state == ReleaseState.GATING and not release.gate:
        return _judge(release, actor=actor)
    return release


def releases_waiting() -> list[Release]:
    """Releases that the conductor has to look at."""
    rows = Release.objects.filter(state__in=[ReleaseState.PENDING, ReleaseState.GATING], gate={})
    rows = rows.select_related("lane__cluster", "lane__project", "version", "incumbent", "run")
    return list(rows.select_related("candidate_evaluation", "incumbent_evaluation").order_by("created_at"))


@transaction.atomic
def _begin_gating(release: Release, *, actor: Actor) -> Release:
    lane = release.lane
    for slot in _free_slots(lane):
        slot_target(
            replica=slot.replica,
            slot=WeightSlot(slot.slot),
            version=release.version,
            source=DesiredSource.CANDIDATE,
            actor=actor,
            reason=f"candidate of lane {lane.slug}",
        )
    candidate, incumbent = (_evaluation(release, version) for version in (release.version, release.incumbent))
    transition(
        release,
        to=ReleaseState.GATING,
        candidate_evaluation=candidate,
        incumbent_evaluation=incumbent,
        revision=F("revision") + 1,
    )
    release.refresh_from_db()
    _record(release, actor=actor)
    return release


def _free_slots(lane: Lane) -> list[ReplicaSlot]:
    """One slot on each replica of the lane's cluster that the promoted version does not need."""
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster).select_related("replica").order_by("-slot")
    free: dict[Any, ReplicaSlot] = {}
    held: dict[Any, int] = {}
    for slot in slots:
        held[slot.replica_id] = held.get(slot.replica_id, 0) + 1
        if slot.desired_version_id != lane.promoted_version_id:
            free.setdefault(slot.replica_id, slot)
    for replica_id in held.keys() - free.keys():
        spare = [slot for slot in slots if slot.replica_id == replica_id and slot.slot != WeightSlot.DEFAULT]
        if spare:
            free[replica_id] = spare[0]
    if not free:
        raise Conflict(f"cluster {lane.cluster.slug} has no replica that can hold two versions at once")
    return list(free.values())


def _evaluation(release: Release, version: PolicyVersion | None) -> Evaluation:
    if version is None:
        raise Invalid("the lane has no incumbent to compare with")
    plan = gate_plan(release)
    return evaluation_request(
        project=release.lane.project,
        version=version,
        task_set=plan.task_set,
        rubric_version=plan.rubric_version,
        task_count=plan.task_count,
    )


class GateVerdict(StrEnum):
    """What a gate says. Only `pass` lets a candidate on."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What a candidate and the incumbent are compared on."""

    task_set: TaskSet
    rubric_version: RubricVersion
    task_count: int


def gate_plan(release: Release) -> GatePlan:
    """Task set, rubric version and count: those of the last stage of the run that made the version.

    Raises: Invalid without a run, or when the project has no such task set or rubric any more.
    """
    stage = release.run.stages.order_by("-position").first() if release.run else None
    if stage is None:
        raise Invalid("a release needs the run that made its version, for its gate", field="run")
    spec = msgspec.convert(stage.spec, type=RlStage | RealtimeStage)
    if isinstance(spec, RealtimeStage):
        slug, rubric = spec.evaluation_task_set, spec.evaluation_rubric
    else:
        slug, rubric = spec.task_set, spec.rubric
    project = release.lane.project
    task_set = stage.task_set or TaskSet.objects.filter(project=project, slug=slug).order_by("-version").first()
    versions = RubricVersion.objects.filter(rubric__project=project, rubric__slug=rubric).order_by("-number")
    rubric_version = stage.rubric_version or versions.first()
    if task_set is None or rubric_version is None:
        raise Invalid(f"the gate needs task set {slug!r} and rubric {rubric!r} in this project", field="run")
    return GatePlan(task_set, rubric_version, spec.eval_tasks)


@transaction.atomic
def _judge(release: Release, *, actor: Actor) -> Release:
    """Compare candidate and incumbent on the same tasks. No data is not a pass."""
    candidate, incumbent = release.candidate_evaluation, release.incumbent_evaluation
    if candidate is None or incumbent is None:
        return release
    if EvaluationState.FAILED in (candidate.state, incumbent.state):
        gate = {"verdict": GateVerdict.INCONCLUSIVE, "detail": "an evaluation failed; see its dead letters"}
    elif candidate.state != EvaluationState.DONE or incumbent.state != EvaluationState.DONE:
        return release
    else:
        gate = _gate(candidate, incumbent, margin=release.lane.non_inferiority_margin)
    moved = Release.objects.filter(id=release.id, revision=release.revision, state=ReleaseState.GATING)
    if not moved.update(gate=gate, revision=F("revision") + 1):
        raise Conflict("the release moved meanwhile; read it again")
    release.refresh_from_db()
    _record(release, actor=actor)
    return release


def judge_differences(differences: list[float], *, margin: float) -> dict[str, Any]:
    """Pass when the interval of the paired differences lies above -margin, fail when below it, else inconclusive.

    Fewer than two pairs are no data, and no data is not a pass.
    """
    if len(differences) < 2:
        detail = "fewer than two tasks were scored for both"
        return {"verdict": GateVerdict.INCONCLUSIVE, "n": len(differences), "detail": detail}
    result = paired_interval(differences)
    verdict = GateVerdict.INCONCLUSIVE
    if result.low > -margin:
        verdict = GateVerdict.PASS
    elif result.high < -margin:
        verdict = GateVerdict.FAIL
    return {
        "verdict": verdict,
        "n": result.n,
        "difference": result.mean,
        "low": result.low,
        "high": result.high,
        "margin": margin,
    }


def _gate(candidate: Evaluation, incumbent: Evaluation, *, margin: float) -> dict[str, Any]:
    ours, theirs = _rewards(candidate), _rewards(incumbent)
    differences = [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]
    gate = judge_differences(differences, margin=margin)
    return {**gate, "candidate_mean": candidate.mean_reward, "incumbent_mean": incumbent.mean_reward}


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    rows = evaluation.groups.filter(mean_reward__isnull=False).values_list("task__key", "mean_reward")
    return {key: reward for key, reward in rows if reward is not None}


@transaction.atomic
def release_approve(*, release: Release, user: User, actor: Actor, reason: str) -> Approval:
    """One person's word for a release. Raises: Forbidden for its proposer; Conflict when it has ended."""
    locked = Release.objects.select_for_update().get(id=release.id)
    if locked.proposer_id == user.id:
        raise Forbidden("a release is approved by people other than its proposer")
    if locked.state in (ReleaseState.SKIPPED, ReleaseState.FAILED, ReleaseState.ROLLED_BACK, ReleaseState.PROMOTED):
        raise Conflict(f"the release is {locked.state}")
    if not reason.strip():
        raise Invalid("say why you approve", field="reason")
    approval, created = Approval.objects.get_or_create(release=locked, user=user, defaults={"reason": reason})
    if created:
        event_append(
            project_id=locked.lane.project_id,
            topic=lane_topic(locked.lane_id),
            event_type=EventType.RELEASE_APPROVED,
            actor=actor,
            reason=reason,
            data={"release": str(locked.id), "approvals": locked.approvals.count()},
        )
    return approval


@transaction.atomic
def release_promote(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Let the candidate answer users. It is resident beside the incumbent already, so only the pointer moves.

    Raises: StaleRevision; Conflict without a passed gate or enough approvals, or when a replica lacks the version.
    """
    release = _locked(release, expected_revision)
    lane = release.lane
    if release.gate.get("verdict") != GateVerdict.PASS:
        raise Conflict(f"the gate's verdict is {release.gate.get('verdict', 'not there yet')}, not pass")
    others = sum(approval.user_id != release.proposer_id for approval in release.approvals.all())
    if others < lane.approvals:
        raise Conflict(f"{lane.approvals} approval(s) of others than the proposer are needed, {others} given")
    _require_resident(lane, release.version)
    transition(release, to=ReleaseState.PROMOTED, promoted_at=Now(), finished_at=Now(), revision=F("revision") + 1)
    lane_point(lane=lane, version=release.version, release=release, actor=actor, reason=reason)
    _relabel(lane, promoted=release.version)
    release.refresh_from_db()
    _record(release, actor=actor, reason=reason)
    return release


@transaction.atomic
def release_rollback(*, release: Release, actor: Actor, reason: str) -> Release:
    """Let the incumbent answer again, at once: it is still resident. The bad version's feedback is quarantined.

    Raises: Conflict when the release is not the promoted one; Invalid without a reason.
    """
    if not reason.strip():
        raise Invalid("say why you roll back", field="reason")
    release = _locked(release, None)
    lane, good = release.lane, release.incumbent
    if release.state != ReleaseState.PROMOTED or lane.promoted_version_id != release.version_id or good is None:
        raise Conflict("only the promoted release can be rolled back")
    transition(release, to=ReleaseState.ROLLED_BACK, finished_at=Now(), revision=F("revision") + 1)
    lane_point(lane=lane, version=good, release=release, actor=actor, reason=reason)
    _relabel(lane, promoted=good)
    PolicyVersion.objects.filter(id__in=_descendants(release.version)).update(quarantined_at=Now())
    feedback_quarantine(version=release.version)
    release.refresh_from_db()
    _record(release, actor=actor, reason=reason)
    return release


@transaction.atomic
def release_end(*, release: Release, actor: Actor, reason: str, expected_revision: int | None = None) -> Release:
    """Skip a release that is in flight. One person and a reason are enough."""
    if not reason.strip():
        raise Invalid("say why the release ends", field="reason")
    release = _locked(release, expected_revision)
    transition(release, to=ReleaseState.SKIPPED, finished_at=Now(), revision=F("revision") + 1)
    release.refresh_from_db()
    _record(release, actor=actor, reason=reason)
    return release


def _locked(release: Release, expected_revision: int | None) -> Release:
    row = (
        Release.objects.select_for_update(of=("self",))
        .select_related("lane", "version", "incumbent")
        .get(id=release.id)
    )
    if expected_revision is not None and row.revision != expected_revision:
        raise StaleRevision(f"the release is at revision {row.revision}, not {expected_revision}; read it again")
    return row


def _require_resident(lane: Lane, version: PolicyVersion) -> None:
    replicas = {slot.replica_id for slot in ReplicaSlot.objects.filter(replica__cluster=lane.cluster)}
    holding = ReplicaSlot.objects.filter(replica__cluster=lane.cluster, current_version=version)
    missing = replicas - {slot.replica_id for slot in holding}
    if missing or not replicas:
        raise Conflict(
            f"{len(missing)} replica(s) of {lane.cluster.slug} do not hold {version} yet; wait for the transfer"
        )


def _relabel(lane: Lane, *, promoted: PolicyVersion) -> None:
    slots = ReplicaSlot.objects.filter(replica__cluster=lane.cluster)
    slots.filter(desired_version=promoted).update(desired_source=DesiredSource.PROMOTED)
    slots.exclude(desired_version=promoted).update(desired_source=DesiredSource.CANDIDATE)


def _descendants(version: PolicyVersion) -> list[Any]:
    found, frontier = [version.id], [version.id]
    while frontier:
        frontier = list(PolicyVersion.objects.filter(parent_id__in=frontier).values_list("id", flat=True))
        found += frontier
    return found


def _record(release: Release, *, actor: Actor, reason: str = "") -> None:
    event_append(
        project_id=release.lane.project_id,
        topic=lane_topic(release.lane_id),
        event_type=EventType.RELEASE_CHANGED,
        actor=actor,
        reason=reason,
        data={
            "release": str(release.id),
            "lane": str(release.lane_id),
            "version": str(release.version),
            "state": release.state,
            "verdict": release.gate.get("verdict"),
        },
    )
