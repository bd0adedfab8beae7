"""Rows for the conductor's benchmark: whole runs played by simulated workers, and long histories."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db import connection
from django.utils import timezone

from controlplane.conductor import run_advance
from controlplane.models import (
    PolicyVersion,
    Project,
    Replica,
    Rollout,
    RolloutGroup,
    RubricVersion,
    Run,
    Step,
    WorkUnit,
)
from controlplane.services.catalog import model_register, rubric_publish, task_set_create
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_create, replica_register
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
from controlplane.services.runs import run_create
from controlplane.services.steps import step_begin, step_publish, step_version_begin
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.services.versions import PublishedWeights
from controlplane.services.work import Claim, work_claim
from controlplane.states import (
    GroupPurpose,
    GroupState,
    ReplicaState,
    RunState,
    StepState,
    VersionState,
    WorkKind,
    WorkState,
)
from rl_core.environments.tasks import Task, TaskSet
from rl_core.types import ClusterRole, Ending, Split

ATTEMPTS = 8
_numbers = itertools.count(1)


@dataclass
class Life:
    """One run from its start to its last step."""

    groups: int = 0
    seconds: float = 0.0
    conductor_cpu_s: float = 0.0
    ticks_s: list[float] = field(default_factory=list)


def live(*, steps: int, prompts: int) -> Life:
    """Play a whole run; evaluations are small, so that the groups of steps are what is measured."""
    run, life = make_run(steps=steps, prompts=prompts), Life()
    started = time.perf_counter()
    while run.finished_at is None:
        tick, cpu = time.perf_counter(), time.process_time()
        run_advance(run.pk)
        life.ticks_s.append(time.perf_counter() - tick)
        life.conductor_cpu_s += time.process_time() - cpu
        for unit in WorkUnit.objects.filter(project=run.project, state=WorkState.QUEUED).order_by("created_at"):
            claim = work_claim(unit_id=unit.pk, worker="bench")
            if claim is not None:
                _WORK[claim.kind](claim)
        run.refresh_from_db()
    if run.state != RunState.COMPLETED:
        raise RuntimeError(f"the benchmark's run is {run.state}: {run.state_reason}")
    life.seconds = time.perf_counter() - started
    life.groups = run.groups.filter(purpose=GroupPurpose.TRAIN, state=GroupState.CONSUMED).count()
    return life


def make_run(*, steps: int, prompts: int) -> Run:
    """A run in a project of its own, with two clusters of one replica each."""
    name = f"bench-{next(_numbers)}"
    project = Project.objects.create(slug=name, name=name)
    model_register(
        project=project,
        slug="model",
        folder="/nowhere",
        root="a" * 64,
        manifest_key="snapshots/model/manifest.json",
        full_bytes=1,
        parameters=1,
        architecture="none",
        actor=SYSTEM,
    )
    tasks = tuple(
        Task(id=f"{split}-{n}", split=split, input={"question": f"{split} {n}"}) for split in Split for n in range(50)
    )
    environment = "word-problems"
    task_set_create(project=project, slug=environment, environment=environment, tasks=TaskSet(tasks), actor=SYSTEM)
    criteria = [{"key": "ran", "text": "a call ran", "kind": "tool_ran", "weight": 1.0}]
    rubric_publish(project=project, slug=environment, criteria=criteria, author=None, note="", actor=SYSTEM)
    for slug in ("east", "west"):
        cluster = cluster_create(
            project=project, slug=slug, role=ClusterRole.ROLLOUT, region=slug, capacity=64, actor=SYSTEM
        )
        replica = replica_register(
            cluster=cluster, name=slug, inference_url="http://x", control_url="http://x", actor=SYSTEM
        )
        Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
    stage = {"kind": "rl", "steps": steps, "prompts_per_step": prompts, "group_size": ATTEMPTS, "eval_tasks": 1}
    return run_create(project=project, name=name, spec={"model": "model", "stages": [stage]}, actor=SYSTEM)


def history(*, groups: int) -> Run:
    """A running run with that many consumed groups behind it, waiting for rollouts."""
    run = make_run(steps=groups, prompts=GROUPS_A_STEP)
    run_advance(run.pk)
    run_advance(run.pk)
    run.refresh_from_db()
    stage, task = run.stages.get(), run.project.task_sets.get().tasks.first()
    now, first = timezone.now(), run.lineage.versions.get()
    versions = [
        PolicyVersion(
            lineage=run.lineage, epoch=0, number=n, state=VersionState.COMMITTED, parent=first, root="b" * 64,
            manifest_key="m", committed_at=now,
        )
        for n in range(1, groups // GROUPS_A_STEP + 1)
    ]  # fmt: skip
    PolicyVersion.objects.bulk_create(versions, batch_size=2000)
    steps = [
        Step(run=run, stage=stage, number=v.number, state=StepState.PUBLISHED, base_version=first, version=v)
        for v in versions
    ]
    Step.objects.bulk_create(steps, batch_size=2000)
    rows = [
        RolloutGroup(
            run=run, stage=stage, step=steps[n // GROUPS_A_STEP], task=task, purpose=GroupPurpose.TRAIN,
            state=GroupState.CONSUMED, position=1000 + n, draw=1000 + n, size=ATTEMPTS, seed=n, admitted_version=first,
            oldest_version=first, mean_reward=0.5, finished_at=now,
        )
        for n in range(groups)
    ]  # fmt: skip
    RolloutGroup.objects.bulk_create(rows, batch_size=2000)
    _attempts_and_units(run)
    run.lineage.head = versions[-1]
    run.lineage.save(update_fields=["head"])
    for _ in range(5):
        run_advance(run.pk)
    return run


def _attempts_and_units(run: Run) -> None:
    """The rollouts and the finished work of the run's consumed groups, made by the database itself."""
    rollout, unit, group = (model._meta.db_table for model in (Rollout, WorkUnit, RolloutGroup))
    consumed = f"{group} g WHERE g.run_id = %s AND g.state = 'consumed'"
    # S608: the names are our own tables'.
    attempts = (
        f"INSERT INTO {rollout} (id, group_id, attempt, state, session_key, trajectory_key, turns,"  # noqa: S608
        " sampled_tokens, prompt_tokens, ending, fault, error, reward)"
        " SELECT gen_random_uuid(), g.id, n, 'scored', '', 'blobs/x', 2, 40, 200, 'terminated', '', '', 0.5"
        f" FROM generate_series(0, {ATTEMPTS - 1}) n, {consumed}"
    )
    units = (
        f"INSERT INTO {unit} (id, kind, ref, run_id, project_id, state, fence, failures, max_failures,"  # noqa: S608
        " worker, sends, error_code, error)"
        " SELECT gen_random_uuid(), kind, g.id, g.run_id, %s, 'done', 1, 0, 5, 'bench', 1, '', ''"
        f" FROM unnest(ARRAY['rollout', 'score']) kind, {consumed}"
    )
    with connection.cursor() as cursor:
        cursor.execute(attempts, [run.pk])
        cursor.execute(units, [run.project_id, run.pk])


def look(run: Run) -> None:
    """One look at a run in which nothing has changed."""
    run_advance(run.pk)


def analyze() -> None:
    """Let the planner know the tables, as autovacuum does in time."""
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


GROUPS_A_STEP = 4


def _roll_out(claim: Claim) -> None:
    group = group_begin(claim)
    if group is None:
        return
    version = group.admitted_version
    for rollout in group.rollouts.order_by("attempt"):
        for turn in (1, 2):
            progress = RolloutProgress(
                turns=turn,
                sampled_tokens=20 * turn,
                prompt_tokens=200,
                trajectory_key=f"blobs/{turn}",
                session_key=f"blobs/{turn}",
                oldest_version=version,
                newest_version=version,
            )
            if turn == 1:
                rollout_checkpoint(claim, rollout_id=rollout.pk, progress=progress)
        rollout_finish(claim, rollout_id=rollout.pk, progress=progress, ending=Ending.TERMINATED)
    group_finish(claim)


def _score(claim: Claim) -> None:
    group = score_begin(claim)
    if group is None:
        return
    rubric = RubricVersion.objects.get(rubric__project_id=claim.project_id)
    rollouts = group.rollouts.order_by("attempt")
    results = [RolloutScores(rollout.pk, [Scored("ran", 1.0, "bench")], 1.0) for rollout in rollouts]
    score_record(claim, rubric_version=rubric, results=results)


def _train(claim: Claim) -> None:
    step = step_begin(claim)
    if step is None:
        return
    version = step_version_begin(claim, step=step)
    weights = PublishedWeights(
        root=uuid.uuid4().hex * 2,
        manifest_key=f"m/{version.number}",
        delta_bytes=1,
        full_bytes=1,
        changed_elements=1,
        elements=1,
    )
    step_publish(claim, step=step, version=version, weights=weights, metrics={f"metric_{n}": 1.0 for n in range(25)})


def _transfer(claim: Claim) -> None:
    row = transfer_begin(claim)
    if row is not None:
        report = TransferReport(root=row.version.root, fetched_bytes=1, hops=1, timings={"pause_s": 0.01})
        transfer_done(claim, report=report)


_WORK: dict[WorkKind, Any] = {
    WorkKind.ROLLOUT: _roll_out,
    WorkKind.SCORE: _score,
    WorkKind.TRAIN: _train,
    WorkKind.TRANSFER: _transfer,
}
