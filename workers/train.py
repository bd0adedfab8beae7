"""The train queue: one optimiser step in the resident trainer, published and committed."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from statistics import fmean
from typing import Any

import structlog
from django.utils import timezone

from controlplane.celery import VERSION_TIME_LIMIT_S
from controlplane.models import PolicyVersion, Step
from controlplane.selectors.followers import profile_for
from controlplane.services.metrics import MISMATCH_OF, Metric
from controlplane.services.steps import (
    run_checkpoint_note,
    step_begin,
    step_publish,
    step_version_begin,
    train_fence,
)
from controlplane.services.versions import PublishedWeights
from controlplane.states import WorkKind
from rl_core.errors import BaseMismatch, CheckpointError, TrainerLost
from rl_core.links import Choice
from rl_core.types import Profile
from workers.announcing import Announcer, announcing
from workers.base import Attempt, unit_task
from workers.trainers import ResidentTrainer

log = structlog.get_logger(__name__)

# One model at a time fits a small machine: the process of a train worker keeps one trainer from step to step.
_resident = ResidentTrainer()


@unit_task(WorkKind.TRAIN, limit_s=VERSION_TIME_LIMIT_S)
def train(attempt: Attempt) -> None:
    """One step. Whatever happens, its batch counts once: the commit is refused to all but the newest attempt."""
    step = step_begin(attempt.claim)
    if step is None:
        return
    train_step(attempt, step, _resident)


def train_step(attempt: Attempt, step: Step, trainer: ResidentTrainer) -> None:
    """Train, publish, commit, and write a checkpoint when it is time.

    A trainer that is lost, or that published for an attempt that was refused, is rebuilt once within the attempt.
    Raises: what the trainer raises, StaleFence.
    """
    started = time.monotonic()
    claim = attempt.claim
    fence, choice = train_fence(claim, step), profile_for(step.run)
    with announcing(step.run) as announcer:
        take = partial(_take, attempt, step, trainer, fence=fence, profile=choice.profile, announcer=announcer)
        try:
            version, answer = take()
        except (TrainerLost, BaseMismatch) as error:
            attempt.check()
            log.warning("trainer_lost", step=step.number, error=str(error)[:300])
            trainer.close()
            version, answer = take()
        attempt.check()
        # From here the fence alone decides: a renewal that came between the commit and the checkpoint would take the
        # done unit for a lost one, and end the trainer.
        attempt.keeper.release(claim)
        busy_s = time.monotonic() - started
        step_publish(
            claim,
            step=step,
            version=version,
            weights=_weights(answer, base=trainer.base, choice=choice),
            metrics=step_metrics(step, answer, busy_s=busy_s),
            over_time=_idle(step, busy_s),
        )
        trainer.published(version)
    log.info("step_published", step=step.number, version=str(version.ref), seconds=round(busy_s, 2))
    if _checkpoint_due(step):
        _checkpoint(step, trainer, fence=fence)


def _take(
    attempt: Attempt, step: Step, trainer: ResidentTrainer, *, fence: int, profile: Profile, announcer: Announcer
) -> tuple[PolicyVersion, dict[str, Any]]:
    trainer.stand_before(step, attempt)
    version = step_version_begin(attempt.claim, step=step)  # after a rebuild, which may have opened an epoch
    announcer.begins(version.ref, fence=fence)
    progress = announcer.progress
    return version, trainer.take(step, version=version.ref, fence=fence, profile=profile, progress=progress)


def step_metrics(step: Step, answer: dict[str, Any], *, busy_s: float) -> dict[str, float]:
    """The trainer's own metrics, and what the batch and the publication say."""
    told = dict(answer["metrics"])
    by_rollout = told.pop("k3_rollouts", {})
    values = {name: float(value) for name, value in told.items() if value is not None}
    numbers = list(
        step.batch.filter(rollout__oldest_version__isnull=False).values_list(
            "rollout__oldest_version__number", flat=True
        )
    )
    if numbers:
        base = step.base_version.number
        values[Metric.STALENESS_MEAN] = base - sum(numbers) / len(numbers)
        values[Metric.STALENESS_MAX] = base - min(numbers)
    values[Metric.DELTA_BYTES] = answer["bytes"]
    values[Metric.DELTA_RATIO] = answer["full_bytes"] / max(1, answer["bytes"])
    values[Metric.CHANGED_SHARE] = answer["changed_elements"] / max(1, answer["elements"])
    values[Metric.STEP_S] = busy_s
    values.pop("step", None)
    return values | _mismatch_of_clusters(step, by_rollout)


def _mismatch_of_clusters(step: Step, by_rollout: dict[str, float]) -> dict[str, float]:
    """Mean k3 of the rollouts of each cluster: of the replica that each of them ended on."""
    batch = step.batch.filter(rollout__replica__isnull=False)
    found: dict[str, list[float]] = defaultdict(list)
    for rollout_id, cluster in batch.values_list("rollout_id", "rollout__replica__cluster__slug"):
        if str(rollout_id) in by_rollout:
            found[cluster].append(by_rollout[str(rollout_id)])
    return {f"{MISMATCH_OF}{cluster}": fmean(values) for cluster, values in found.items()}


def _weights(answer: dict[str, Any], *, base: PolicyVersion | None, choice: Choice) -> PublishedWeights:
    return PublishedWeights(
        root=answer["root"],
        manifest_key=answer["manifest"],
        delta_bytes=answer["bytes"],
        full_bytes=answer["full_bytes"],
        changed_elements=answer["changed_elements"],
        elements=answer["elements"],
        base=base,
        choice=choice,
        encode_s=None if answer["adopted"] else answer["encode_s"],
        upload_s=answer["upload_s"] or None,
    )


def _idle(step: Step, busy_s: float) -> dict[str, float]:
    """Share of the time since the step before that the trainer waited for a batch."""
    before = step.run.steps.filter(number=step.number - 1).first()
    if before is None or before.published_at is None:
        return {}
    wall_s = (timezone.now() - before.published_at).total_seconds()
    return {Metric.TRAINER_IDLE: min(1.0, max(0.0, 1.0 - busy_s / max(wall_s, 1e-6)))}


def _checkpoint_due(step: Step) -> bool:
    """Every so many steps, and at the end of a stage that others follow: the next one starts from it."""
    every = step.stage.spec.get("checkpoint_every", 1)
    last = step.stage.steps.count() >= step.stage.spec.get("steps", 1)
    followed = step.run.stages.filter(position__gt=step.stage.position).exists()
    return step.number % every == 0 or (last and followed)


def _checkpoint(step: Step, trainer: ResidentTrainer, *, fence: int) -> None:
    """A checkpoint that cannot be written costs time after a crash, never a step: say so and go on."""
    try:
        folder = trainer.checkpoint(fence=fence)
    except (CheckpointError, TrainerLost) as error:
        log.error("checkpoint_not_written", step=step.number, error=str(error)[:300])
        return
    run_checkpoint_note(run=step.run, folder=folder, step_number=step.number)
    log.info("checkpoint_written", step=step.number, folder=folder)
