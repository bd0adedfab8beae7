"""Optimiser steps: a batch is fixed, a worker trains it, its version is published. Each rollout counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import Max
from django.db.models.functions import Now

from controlplane.errors import Conflict
from controlplane.models import BatchItem, PolicyVersion, RolloutGroup, Run, Stage, Step
from controlplane.services.events import CONDUCTOR, Actor, event_append, run_topic
from controlplane.services.metrics import metrics_record
from controlplane.services.transitions import transition
from controlplane.services.versions import PublishedWeights, version_begin, version_commit
from controlplane.services.work import Claim, work_enqueue, work_fenced, work_finish
from controlplane.states import ActorKind, EventType, GroupState, StepState, WorkKind
from rl_core.types import Objective

TRAINER = Actor(ActorKind.WORKER, "trainer")
_FENCES_A_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    """One trajectory for a batch: of a rollout or of a generation, exactly one of them. The rest as in `BatchItem`."""

    group_key: str
    reward: float
    trajectory_key: str
    rollout_id: Any = None
    generation_id: Any = None
    objective: Objective = Objective.POLICY_GRADIENT
    advantage: float | None = None
    weight: float = 1.0
    feedback_id: Any = None


def step_create(
    *, run: Run, stage: Stage, entries: Sequence[BatchEntry], window: Mapping[str, Any] | None = None
) -> Step:
    """Fix the run's next batch and want it trained.

    A rollout is in one batch ever; a generation in one at a time, see `window_returns`. `window` is what a real-time
    stage says of where the batch comes from.

    Raises: Conflict while an earlier step is not published, or when the lineage has no head.
    """
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)
        last = run.steps.aggregate(last=Max("number"))["last"] or 0
        if run.steps.exclude(state=StepState.PUBLISHED).exists():
            raise Conflict(f"run {run.name!r} has a step that is not published yet")
        run.lineage.refresh_from_db()
        if run.lineage.head is None:
            raise Conflict(f"lineage {run.lineage_id} has no head")
        step = Step.objects.create(
            run=run, stage=stage, number=last + 1, base_version=run.lineage.head, window=dict(window or {})
        )
        BatchItem.objects.bulk_create(
            BatchItem(
                step=step,
                position=position,
                group_key=entry.group_key,
                rollout_id=entry.rollout_id,
                generation_id=entry.generation_id,
                reward=entry.reward,
                trajectory_key=entry.trajectory_key,
                objective=entry.objective.value,
                advantage=entry.advantage,
                weight=entry.weight,
                feedback_id=entry.feedback_id,
            )
            for position, entry in enumerate(entries)
        )
        work_enqueue(kind=WorkKind.TRAIN, ref=step.pk, project_id=run.project_id, run=run)
    return step


def step_batch(*, run: Run, stage: Stage, groups: Sequence[RolloutGroup]) -> Step:
    """Form a step from ready groups, which are consumed by it. Raises: Conflict when any was taken meanwhile."""
    with transaction.atomic():
        entries = [
            BatchEntry(
                group_key=str(group.pk),
                reward=rollout.reward,
                trajectory_key=rollout.trajectory_key,
                rollout_id=rollout.pk,
            )
            for group in groups
            for rollout in group.rollouts.order_by("attempt")
            if rollout.reward is not None
        ]
        step = step_create(run=run, stage=stage, entries=entries)
        for group in groups:
            transition(group, to=GroupState.CONSUMED, step=step)
        step_event(step, CONDUCTOR, groups=[str(group.pk) for group in groups])
    return step


def step_begin(claim: Claim) -> Step | None:
    """The step to train; None when it is published or no longer wanted (the unit is finished then)."""
    with work_fenced(claim):
        step = Step.objects.select_related("run__lineage__model", "stage", "base_version").get(pk=claim.ref)
        if step.state != StepState.BATCHED:
            work_finish(claim)
            return None
    return step


def train_fence(claim: Claim, step: Step) -> int:
    """The fence of an attempt at a step, larger than that of every attempt at an earlier step of the run.

    A unit's own fence starts anew with every step; trainers and the store see one sequence for a run.
    """
    return step.number * _FENCES_A_STEP + claim.fence


def step_version_begin(claim: Claim, *, step: Step) -> PolicyVersion:
    """Reserve the version that the step will make, in the newest epoch, for this attempt. Raises: StaleFence."""
    with work_fenced(claim):
        step.run.lineage.refresh_from_db()
        lineage = step.run.lineage
        return version_begin(
            lineage=lineage,
            epoch=lineage.epoch,
            number=step.base_version.number + 1,
            parent=step.base_version,
            fence=train_fence(claim, step),
        )


def step_publish(
    claim: Claim,
    *,
    step: Step,
    version: PolicyVersion,
    weights: PublishedWeights,
    metrics: Mapping[str, float],
    over_time: Mapping[str, float] | None = None,
) -> Step:
    """Commit everything that a trained step changes, at once: version, head, step, metrics, events, unit.

    Raises: StaleFence, Conflict: nothing is changed then.
    """
    with work_fenced(claim):
        version_commit(version=version, fence=train_fence(claim, step), weights=weights, run=step.run, actor=TRAINER)
        transition(step, to=StepState.PUBLISHED, version=version, metrics=dict(metrics), published_at=Now())
        work_finish(claim)
        metrics_record(run=step.run, values=metrics, step=step.number, actor=TRAINER)
        if over_time:
            metrics_record(run=step.run, values=over_time, actor=TRAINER, announce=False)
        step_event(step, TRAINER, version=str(version.ref))
    return step


def run_checkpoint_note(*, run: Run, folder: str, step_number: int) -> None:
    """Record the newest whole checkpoint; an older one never replaces it."""
    Run.objects.filter(pk=run.pk, checkpoint_step__lt=step_number).update(
        checkpoint=folder, checkpoint_step=step_number
    )


def step_event(step: Step, actor: Actor, **more: Any) -> None:
    """Append the step's present state to its run's log, in the caller's transaction."""
    event_append(
        project_id=step.run.project_id,
        topic=run_topic(step.run_id),
        event_type=EventType.STEP_CHANGED,
        actor=actor,
        data={
            "run": str(step.run_id),
            "step": str(step.pk),
            "number": step.number,
            "state": step.state,
            **more,
        },
    )
