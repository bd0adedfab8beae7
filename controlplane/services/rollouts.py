"""Rollouts as their workers see them: begun, checkpointed after every turn, finished; then scored. All fenced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Avg, Count, QuerySet
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import CriterionScore, PolicyVersion, Rollout, RolloutGroup, RubricVersion
from controlplane.services.events import Actor, event_append, project_topic, run_topic
from controlplane.services.groups import group_move
from controlplane.services.observations import rollout_note
from controlplane.services.transitions import transition
from controlplane.services.work import Claim, work_enqueue, work_fenced, work_finish
from controlplane.states import ActorKind, EventType, GroupState, RolloutState, WorkKind
from rl_core.environments.watch import Signs
from rl_core.types import Ending, Fault

ROLLOUT_WORKER = Actor(ActorKind.WORKER, "rollout")
SCORE_WORKER = Actor(ActorKind.WORKER, "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """Where a session stands after a turn. Versions are rows of the group's lineage, oldest and newest used."""

    turns: int
    sampled_tokens: int
    prompt_tokens: int
    trajectory_key: str
    session_key: str = ""
    replica_id: uuid.UUID | None = None
    oldest_version: PolicyVersion | None = None
    newest_version: PolicyVersion | None = None

    def columns(self) -> dict[str, Any]:
        """As columns of the rollout."""
        return {
            "turns": self.turns,
            "sampled_tokens": self.sampled_tokens,
            "prompt_tokens": self.prompt_tokens,
            "trajectory_key": self.trajectory_key,
            "session_key": self.session_key,
            "replica_id": self.replica_id,
            "oldest_version": self.oldest_version,
            "newest_version": self.newest_version,
        }


@dataclass(frozen=True, slots=True)
class Scored:
    """One criterion's outcome; `value` is None exactly when `error` says why."""

    criterion: str
    value: float | None
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class RolloutScores:
    """All criteria of one rollout, the reward they combine to (None while any of them failed), and how it behaved."""

    rollout_id: uuid.UUID
    scores: Sequence[Scored] = field(default_factory=tuple)
    reward: float | None = None
    signs: Signs | None = None


def group_begin(claim: Claim) -> RolloutGroup | None:
    """The group to roll out, now running, failed attempts reset; None when it has ended (the unit is finished then)."""
    with work_fenced(claim):
        group = RolloutGroup.objects.select_related("run", "evaluation").get(pk=claim.ref)
        if group.state == GroupState.ADMITTED:
            group_move(group=group, to=GroupState.RUNNING, actor=ROLLOUT_WORKER, started_at=Now())
        if group.state != GroupState.RUNNING:
            work_finish(claim)
            return None
        group.rollouts.filter(state=RolloutState.FAILED).update(
            state=RolloutState.PENDING,
            session_key="",
            trajectory_key="",
            turns=0,
            sampled_tokens=0,
            prompt_tokens=0,
            oldest_version=None,
            newest_version=None,
        )
        group.rollouts.filter(state=RolloutState.PENDING).update(state=RolloutState.RUNNING)
    return group


def rollout_checkpoint(claim: Claim, *, rollout_id: uuid.UUID, progress: RolloutProgress) -> None:
    """Write down a turn that was played; whoever has the unit next goes on from here. Raises: StaleFence."""
    with work_fenced(claim):
        _open_rollout(claim, rollout_id).update(**progress.columns())


def rollout_finish(claim: Claim, *, rollout_id: uuid.UUID, progress: RolloutProgress, ending: Ending) -> None:
    """The session came to its end. Raises: StaleFence; Conflict when the rollout has ended already."""
    with work_fenced(claim):
        ended = _open_rollout(claim, rollout_id).update(
            state=RolloutState.FINISHED,
            ending=ending.value,
            fault="",
            error="",
            finished_at=Now(),
            **progress.columns(),
        )
        if not ended:
            raise Conflict(f"rollout {rollout_id} has ended already")
        group = RolloutGroup.objects.select_related("run", "evaluation").get(pk=claim.ref)
        data = {
            "rollout": str(rollout_id),
            "group": str(group.pk),
            "state": RolloutState.FINISHED.value,
            "turns": progress.turns,
            "ending": ending.value,
        }
        _append(group, claim, data)


def rollout_fail(claim: Claim, *, rollout_id: uuid.UUID, fault: Fault, error: str) -> None:
    """The session broke for a reason that is not the policy's; the group's next attempt starts it again."""
    with work_fenced(claim):
        _open_rollout(claim, rollout_id).update(
            state=RolloutState.FAILED, fault=fault.value, error=error[:500], finished_at=Now()
        )


def group_finish(claim: Claim) -> RolloutGroup:
    """All attempts ended: the group goes to scoring. Raises: StaleFence; Conflict when an attempt is still open."""
    with work_fenced(claim):
        group = RolloutGroup.objects.select_related("run", "evaluation").get(pk=claim.ref)
        rollouts = list(group.rollouts.select_related("oldest_version"))
        if any(rollout.state != RolloutState.FINISHED for rollout in rollouts):
            raise Conflict(f"group {group.pk} has attempts that have not finished")
        oldest = min(
            (rollout.oldest_version for rollout in rollouts if rollout.oldest_version is not None),
            key=lambda version: (version.epoch, version.number),
            default=None,
        )
        work_enqueue(kind=WorkKind.SCORE, ref=group.pk, project_id=claim.project_id, run=group.run)
        work_finish(claim)
        group_move(group=group, to=GroupState.SCORING, actor=ROLLOUT_WORKER, oldest_version=oldest)
    return group


def score_begin(claim: Claim) -> RolloutGroup | None:
    """The group to score; None when it is no longer wanted (the unit is finished then)."""
    with work_fenced(claim):
        group = RolloutGroup.objects.select_related("run", "stage", "evaluation", "task__task_set").get(pk=claim.ref)
        if group.state != GroupState.SCORING:
            work_finish(claim)
            return None
    return group


def score_record(claim: Claim, *, rubric_version: RubricVersion, results: Sequence[RolloutScores]) -> bool:
    """Write every criterion's outcome. When all rollouts have a reward the group is ready and the unit finished.

    Returns whether it is; else the caller fails the attempt, and the graders are tried again for what has no reward: an
    error is kept where its score would be, and is never one, and what was graded stays as it is when a neighbour's
    grader failed. Raises: StaleFence.
    """
    with work_fenced(claim):
        group = RolloutGroup.objects.select_related("run", "evaluation", "task__task_set").get(pk=claim.ref)
        waiting = {rollout.pk: rollout for rollout in group.rollouts.filter(state=RolloutState.FINISHED)}
        fresh = [result for result in results if result.rollout_id in waiting]
        _write_scores(rubric_version, fresh)
        # Tallies are shared by the groups of a task: all lock them in one order.
        for result in sorted(fresh, key=lambda one: str(waiting[one.rollout_id].newest_version_id)):
            if result.reward is not None:
                transition(waiting[result.rollout_id], to=RolloutState.SCORED, reward=result.reward)
                kinds = {str(row["key"]): str(row["kind"]) for row in rubric_version.criteria}
                values = {kinds.get(score.criterion, ""): score.value for score in result.scores}
                rollout_note(group=group, rollout=waiting[result.rollout_id], values=values, signs=result.signs)
        scored = group.rollouts.filter(state=RolloutState.SCORED).aggregate(n=Count("pk"), mean=Avg("reward"))
        if scored["n"] != group.size:
            return False
        work_finish(claim)
        group_move(
            group=group,
            to=GroupState.READY,
            actor=SCORE_WORKER,
            mean_reward=scored["mean"],
            finished_at=Now(),
        )
    return True


def _write_scores(rubric_version: RubricVersion, results: Sequence[RolloutScores]) -> None:
    CriterionScore.objects.bulk_create(
        [
            CriterionScore(
                rollout_id=result.rollout_id,
                rubric_version=rubric_version,
                rubric_hash=rubric_version.content_hash,
                criterion=score.criterion,
                value=score.value,
                reason=score.reason,
                error=score.error[:500],
            )
            for result in results
            for score in result.scores
        ],
        update_conflicts=True,
        unique_fields=["rollout", "rubric_version", "criterion"],
        update_fields=["value", "reason", "error", "rubric_hash"],
    )


def versions_by_text(lineage_id: uuid.UUID, texts: Sequence[str]) -> Mapping[str, PolicyVersion]:
    """The lineage's versions that the texts name; a text that names none of them is left out."""
    wanted = set(texts)
    rows = PolicyVersion.objects.filter(lineage_id=lineage_id, number__in=_numbers(wanted))
    return {str(row.ref): row for row in rows if str(row.ref) in wanted}


def _numbers(texts: set[str]) -> list[int]:
    tails = [text.rpartition("-")[2] for text in texts]
    return [int(tail) for tail in tails if tail.isdigit()]


def _open_rollout(claim: Claim, rollout_id: uuid.UUID) -> QuerySet[Rollout]:
    return Rollout.objects.filter(pk=rollout_id, group_id=claim.ref, state=RolloutState.RUNNING)


def _append(group: RolloutGroup, claim: Claim, data: dict[str, Any]) -> None:
    event_append(
        project_id=claim.project_id,
        topic=run_topic(group.run_id) if group.run_id else project_topic(claim.project_id),
        event_type=EventType.ROLLOUT_CHANGED,
        actor=ROLLOUT_WORKER,
        data=data,
    )
