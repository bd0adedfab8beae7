"""Workers without engines or models: they do to the rows what real ones do, and can be told to misbehave."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from django.db.models import Value
from django.db.models.functions import Now

from controlplane.conductor import run_advance
from controlplane.conductor.fleet import slots_reconcile
from controlplane.errors import StaleFence, Unavailable
from controlplane.models import PolicyVersion, ReplicaSlot, RolloutGroup, RubricVersion, Run, WorkUnit
from controlplane.services.events import SYSTEM
from controlplane.services.rollouts import (
    RolloutProgress,
    RolloutScores,
    Scored,
    group_begin,
    group_finish,
    rollout_checkpoint,
    rollout_finish,
    score_begin,
    score_record,
)
from controlplane.services.runs import run_resume
from controlplane.services.steps import step_begin, step_publish, step_version_begin
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.services.versions import PublishedWeights
from controlplane.services.work import Claim, work_claim, work_fail, work_finish, work_sweep, work_yield
from controlplane.states import RolloutState, RunState, WorkKind, WorkState
from rl_core.types import Ending


class Crash(Exception):
    """The worker's process is gone."""


def root_of(version: PolicyVersion) -> str:
    """A root that depends on the version alone."""
    return hashlib.sha256(str(version.ref).encode()).hexdigest()


def due(unit: WorkUnit) -> None:
    """Let no backoff hold the unit."""
    WorkUnit.objects.filter(pk=unit.pk, state=WorkState.QUEUED).update(next_send_at=Now())


def claim_of(unit: WorkUnit) -> Claim | None:
    """Claim at once."""
    due(unit)
    return work_claim(unit_id=unit.pk, worker="simulated")


def lapse(claim: Claim) -> None:
    """As if the lease had run out and the sweeper had come by."""
    WorkUnit.objects.filter(pk=claim.unit_id, state=WorkState.LEASED).update(
        lease_until=Now() - Value(timedelta(seconds=1))
    )
    work_sweep()


def serving_version(group: RolloutGroup) -> PolicyVersion | None:
    """What a replica would answer this group with now, or None when none may."""
    slots = ReplicaSlot.objects.filter(current_version__lineage_id=group.admitted_version.lineage_id)
    held = [slot.current_version for slot in slots.select_related("current_version") if slot.current_version]
    if group.evaluation_id:
        return next((version for version in held if version.pk == group.admitted_version_id), None)
    return max(held, key=lambda version: (version.epoch, version.number), default=None)


def roll_out(claim: Claim, *, between: Callable[[], None] = lambda: None) -> None:
    """One slice: every open attempt plays two turns, or the slice yields when no replica may answer."""
    group = group_begin(claim)
    if group is None:
        return
    for rollout in group.rollouts.filter(state=RolloutState.RUNNING).order_by("attempt"):
        version = serving_version(group)
        if version is None:
            work_yield(claim)
            return
        oldest = rollout.oldest_version or version
        progress = RolloutProgress(
            turns=1,
            sampled_tokens=5,
            prompt_tokens=9,
            trajectory_key="blobs/aa/t1",
            session_key="blobs/aa/s1",
            oldest_version=oldest,
            newest_version=version,
        )
        rollout_checkpoint(claim, rollout_id=rollout.pk, progress=progress)
        between()
        rollout_finish(claim, rollout_id=rollout.pk, progress=progress, ending=Ending.TERMINATED)
    group_finish(claim)


def score(claim: Claim, *, reward: Callable[[], float] = lambda: 1.0) -> None:
    """Every attempt gets a reward."""
    group = score_begin(claim)
    if group is None:
        return
    rubric = RubricVersion.objects.get(rubric__project_id=claim.project_id)
    results = []
    for rollout in group.rollouts.order_by("attempt"):
        value = reward()
        results.append(RolloutScores(rollout.pk, [Scored("ran", value, "simulated")], value))
    score_record(claim, rubric_version=rubric, results=results)


def transfer(claim: Claim) -> None:
    """The replica takes the version at once."""
    row = transfer_begin(claim)
    if row is not None:
        report = TransferReport(root=row.version.root, fetched_bytes=10, hops=1, timings={"pause_s": 0.01})
        transfer_done(claim, report=report)


def train(claim: Claim, *, between: Callable[[], None] = lambda: None) -> None:
    """One step, published."""
    step = step_begin(claim)
    if step is None:
        return
    version = step_version_begin(claim, step=step)
    between()
    weights = PublishedWeights(
        root=root_of(version),
        manifest_key=f"m/{version.ref.epoch}-{version.number}/{claim.fence}",
        delta_bytes=10,
        full_bytes=1000,
        changed_elements=3,
        elements=100,
    )
    step_publish(claim, step=step, version=version, weights=weights, metrics={"reward_mean": 0.5})


@dataclass
class Simulation:
    """Drives a run with workers that crash, lapse, repeat and reorder, as its random numbers say."""

    run: Run
    rng: random.Random
    misbehaviour: float = 0.25
    refused: int = 0
    crashed: int = 0
    old_claims: list[Claim] = field(default_factory=list)

    def go(self, *, rounds: int) -> Run:
        """Until the run has ended, or the rounds are over."""
        for _ in range(rounds):
            self.run.refresh_from_db()
            if self.run.state == RunState.FAILED:  # by bad luck alone: a person says go on
                run_resume(run=self.run, actor=SYSTEM, reason="simulated")
            elif self.run.finished_at is not None:
                break
            self.once()
        return self.run

    def once(self) -> None:
        """The conductor looks zero to three times; then some worker does something."""
        for _ in range(self.rng.randint(0, 3)):
            run_advance(self.run.pk)
            slots_reconcile()
        self._come_back()
        units = list(WorkUnit.objects.filter(project=self.run.project, state=WorkState.QUEUED).order_by("pk"))
        if units:
            self._work(self.rng.choice(units))

    def _come_back(self) -> None:
        """A worker that was taken for dead tries to end its unit after all."""
        if self.old_claims and self.rng.random() < 0.5:
            claim = self.old_claims.pop(self.rng.randrange(len(self.old_claims)))
            try:
                self._do(claim, careful=True)
            except StaleFence:
                self.refused += 1

    def _work(self, unit: WorkUnit) -> None:
        claim = claim_of(unit)
        if claim is None:
            return
        try:
            self._do(claim, careful=False)
        except Crash:
            self.crashed += 1
            lapse(claim)
            self.old_claims.append(claim)
        else:
            if self.rng.random() < self.misbehaviour:
                self.old_claims.append(claim)  # it will say once more that it is done

    def _do(self, claim: Claim, *, careful: bool) -> None:
        trouble = (lambda: None) if careful else self._maybe_crash
        if not careful and self.rng.random() < self.misbehaviour / 3:
            work_fail(claim, Unavailable("simulated"))
            return
        trouble()
        if claim.kind == WorkKind.ROLLOUT:
            roll_out(claim, between=trouble)
        elif claim.kind == WorkKind.SCORE:
            score(claim, reward=lambda: self.rng.choice([0.0, 0.5, 1.0]))
        elif claim.kind == WorkKind.TRANSFER:
            transfer(claim)
        elif claim.kind == WorkKind.TRAIN:
            train(claim, between=trouble)
        else:
            work_finish(claim)

    def _maybe_crash(self) -> None:
        if self.rng.random() < self.misbehaviour / 2:
            raise Crash
