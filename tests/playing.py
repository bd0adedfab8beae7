"""Runs played through the services that the conductor and the workers call.

Rows and events are those of a real run, step by step; only the numbers are made up. Trajectories are real blobs in the
object store.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

from django.conf import settings
from django.db import transaction

from controlplane.models import (
    Cluster,
    PolicyVersion,
    Project,
    Replica,
    Rollout,
    RolloutGroup,
    RubricVersion,
    Run,
    Stage,
    Step,
    TaskSet,
    Transfer,
    WorkUnit,
)
from controlplane.services.evaluations import evaluation_advance, evaluation_request
from controlplane.services.events import CONDUCTOR
from controlplane.services.fleet import slot_target
from controlplane.services.groups import Draw, groups_admit
from controlplane.services.metrics import CLUSTER_VERSION, ENGINE_IDLE_OF, Metric, metrics_record
from controlplane.services.replica_reports import ReplicaReport, SlotReport, replica_report
from controlplane.services.rollouts import (
    RolloutProgress,
    RolloutScores,
    Scored,
    group_begin,
    group_finish,
    rollout_finish,
    score_begin,
    score_record,
)
from controlplane.services.runs import run_create, run_move, stage_move
from controlplane.services.steps import step_batch, step_begin, step_publish, step_version_begin
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.services.versions import PublishedWeights
from controlplane.services.work import Claim, work_claim, work_fail
from controlplane.states import DesiredSource, RunState, StageState, WeightSlot, WorkKind
from rl_core.errors import WorldError
from rl_core.store import open_store
from rl_core.types import (
    ClusterRole,
    Ending,
    Split,
)
from tests.factories import ELEMENTS, FULL_BYTES, Workspace, digest, make_trajectory


def start_run(workspace: Workspace, *, name: str = "Word problems", steps: int = 18, **stage: Any) -> Run:
    """A run of the workspace, already running."""
    spec = {
        "model": "smollm2-135m",
        "seed": 1,
        "stages": [{"kind": "rl", "steps": steps, "prompts_per_step": 2, "group_size": 4, "eval_tasks": 3, **stage}],
    }
    run = run_create(project=workspace.project, name=name, spec=spec, actor=CONDUCTOR, user=workspace.owner)
    begin_run(run)
    return run


def begin_run(run: Run) -> None:
    """What the conductor does with a pending run."""
    stage = run.stages.get(position=0)
    with transaction.atomic():
        run_move(run=run, to=RunState.RUNNING, actor=CONDUCTOR, reason="", started_at=run.created_at)
        stage_move(
            stage=stage,
            to=StageState.RUNNING,
            actor=CONDUCTOR,
            task_set=TaskSet.objects.filter(project=run.project).latest("version"),
            rubric_version=RubricVersion.objects.filter(rubric__project=run.project).latest("number"),
        )


def claim_of(kind: WorkKind, ref: uuid.UUID, worker: str = "worker-1") -> Claim:
    """Claim the unit about a row. Raises: AssertionError when nobody may."""
    unit = WorkUnit.objects.get(kind=kind, ref=ref)
    claim = work_claim(unit_id=unit.pk, worker=f"{kind.value}-{worker}")
    assert claim is not None, f"{kind} unit is {unit.state}"
    return claim


def play_step(run: Run, *, skill: float, luck: random.Random, hostile: str = "") -> None:
    """One whole step: groups admitted, rolled out, scored, batched, trained, published, sent to every replica."""
    publish_step(batch_step(run, skill=skill, luck=luck, hostile=hostile), skill=skill, luck=luck)


def batch_step(run: Run, *, skill: float, luck: random.Random, hostile: str = "") -> Step:
    """The first half of a step: groups admitted, rolled out, scored, batched."""
    stage = run.stages.get(position=0)
    run.lineage.refresh_from_db()
    groups = admit(run, stage)
    for group in groups:
        play_group(group, skill=skill, luck=luck, hostile=hostile)
    for group in groups:
        group.refresh_from_db()
    return step_batch(run=run, stage=stage, groups=groups)


def publish_step(step: Step, *, skill: float, luck: random.Random) -> None:
    """The second half: trained, published, sent to every replica."""
    run = step.run
    claim = claim_of(WorkKind.TRAIN, step.pk)
    begun = step_begin(claim)
    assert begun is not None
    version = step_version_begin(claim, step=begun)
    rewards = list(step.batch.values_list("reward", flat=True))
    delta = int(FULL_BYTES / (90 + 40 * luck.random()))
    step_publish(
        claim,
        step=begun,
        version=version,
        weights=PublishedWeights(
            root=digest(str(version.pk)),
            manifest_key=f"lineages/{version.lineage_id}/{version.epoch}-{version.number}/{claim.fence}/manifest.json",
            delta_bytes=delta,
            full_bytes=FULL_BYTES,
            changed_elements=int(ELEMENTS * 0.02 * (1 + luck.random())),
            elements=ELEMENTS,
        ),
        metrics={
            Metric.REWARD_MEAN: sum(rewards) / len(rewards),
            Metric.STALENESS_MEAN: luck.random(),
            Metric.STALENESS_MAX: luck.choice([0, 1, 1, 2]),
            Metric.DELTA_BYTES: delta,
            Metric.DELTA_RATIO: FULL_BYTES / delta,
            Metric.STEP_S: 8 + 4 * luck.random(),
            "k1_behaviour": luck.gauss(0, 2e-4),
            "k3_behaviour": 3e-4 * (1 + luck.random()),
            "entropy": 1.4 - skill,
            "grad_norm": 0.4 + luck.random() / 5,
            "share_masked": luck.random() / 50,
            "share_capped": luck.random() / 80,
        },
    )
    idle = {f"{ENGINE_IDLE_OF}{cluster.slug}": luck.random() / 3 for cluster in _clusters(run.project)}
    over_time = {
        Metric.TOKENS_PER_S: 60 + 30 * luck.random(),
        Metric.TRAINER_IDLE: luck.random() / 2,
        Metric.ENGINE_IDLE: sum(idle.values()) / max(1, len(idle)),
    }
    metrics_record(run=run, values={**over_time, **idle}, announce=False)
    version.refresh_from_db()
    send_version(run, version)


def _clusters(project: Project) -> list[Cluster]:
    return list(Cluster.objects.filter(project=project, role=ClusterRole.ROLLOUT.value))


def admit(run: Run, stage: Stage) -> list[RolloutGroup]:
    """As many groups as the stage wants for a step."""
    tasks = TaskSet.objects.filter(project=run.project).latest("version").tasks.filter(split=Split.TRAIN.value)
    first = stage.admitted_groups
    count = int(stage.spec["prompts_per_step"])
    chosen = list(tasks.order_by("position")[first % 30 : first % 30 + count])
    assert run.lineage.head is not None
    return groups_admit(
        run=run,
        stage=stage,
        draws=[Draw(stage.draws + offset, task) for offset, task in enumerate(chosen)],
        size=int(stage.spec["group_size"]),
        version=run.lineage.head,
        run_seed=1,
    )


def play_group(group: RolloutGroup, *, skill: float, luck: random.Random, hostile: str = "") -> None:
    """Roll out and score one group."""
    outcomes = roll_out(group, skill=skill, luck=luck, hostile=hostile)
    score = claim_of(WorkKind.SCORE, group.pk)
    scoring = score_begin(score)
    assert scoring is not None
    rubric = RubricVersion.objects.filter(rubric__project=group.task.task_set.project).latest("number")
    score_record(score, rubric_version=rubric, results=[_scores(pk, *outcome) for pk, outcome in outcomes.items()])


def roll_out(
    group: RolloutGroup, *, skill: float, luck: random.Random, hostile: str = ""
) -> dict[uuid.UUID, tuple[bool, bool]]:
    """Roll out one group, up to where it waits for its scores. Returns what each attempt did: ran a call, was right."""
    claim = claim_of(WorkKind.ROLLOUT, group.pk)
    begun = group_begin(claim)
    assert begun is not None
    replica = Replica.objects.filter(cluster__project=group.task.task_set.project).first()
    outcomes: dict[uuid.UUID, tuple[bool, bool]] = {}
    for rollout in group.rollouts.order_by("attempt"):
        ran = luck.random() < min(1.0, skill + 0.3)
        right = ran and luck.random() < skill
        outcomes[rollout.pk] = (ran, right)
        _finish_rollout(claim, group, rollout, replica, ran=ran, right=right, hostile=hostile)
    group_finish(claim)
    return outcomes


def _scores(rollout_id: uuid.UUID, ran: bool, right: bool) -> RolloutScores:
    scores = [
        Scored("tool_ran", float(ran), "the calculator was called once" if ran else "no call was made"),
        Scored("tool_result_right", float(ran), "the result is the solution" if ran else "no call succeeded"),
        Scored("final_number_right", float(right), "the last turn states the number" if right else "it does not"),
    ]
    return RolloutScores(rollout_id, scores, reward=0.5 * float(ran) + 0.5 * float(right))


def _finish_rollout(
    claim: Claim,
    group: RolloutGroup,
    rollout: Rollout,
    replica: Replica | None,
    *,
    ran: bool,
    right: bool,
    hostile: str,
) -> None:
    trajectory = make_trajectory(group, seed=rollout.pk.int % 1000, ran=ran, right=right, hostile=hostile)
    key = open_store(settings.STORE_URL).put_blob(trajectory.to_bytes())
    versions = [version for version in (group.admitted_version, group.admitted_version.parent) if version is not None]
    progress = RolloutProgress(
        turns=2,
        sampled_tokens=trajectory.sampled_tokens(),
        prompt_tokens=40,
        trajectory_key=key,
        replica_id=replica.pk if replica else None,
        oldest_version=versions[-1],
        newest_version=versions[0],
    )
    rollout_finish(claim, rollout_id=rollout.pk, progress=progress, ending=Ending.TERMINATED)


def send_version(run: Run, version: PolicyVersion, *, lagging: str = "") -> None:
    """Target every replica of the rollout clusters at a version and carry the transfers out, but for `lagging`."""
    for cluster in _clusters(run.project):
        for replica in cluster.replicas.all():
            transfer = slot_target(
                replica=replica,
                slot=WeightSlot.DEFAULT,
                version=version,
                source=DesiredSource.TRAINING_HEAD,
                actor=CONDUCTOR,
            )
            if transfer is None or cluster.slug == lagging:
                continue
            receive(transfer)
            metrics_record(run=run, values={f"{CLUSTER_VERSION}{cluster.slug}": version.number}, announce=False)


def receive(transfer: Transfer) -> None:
    """Carry a transfer out, and look at its replica as the conductor does."""
    claim = claim_of(WorkKind.TRANSFER, transfer.pk)
    begun = transfer_begin(claim)
    assert begun is not None
    report = TransferReport(
        root=begun.version.root,
        fetched_bytes=begun.version.delta_bytes or 0,
        hops=1,
        timings={"fetch_s": 0.11, "decode_s": 0.42, "verify_s": 0.2, "stage_s": 0.05, "pause_s": 0.034},
    )
    transfer_done(claim, report=report)
    held = begun.replica.slots.filter(current_version__isnull=False).select_related("current_version")
    slots = {row.slot: SlotReport(str(row.current_version.ref), row.current_version.root) for row in held}
    slots[transfer.slot] = SlotReport(str(begun.version.ref), begun.version.root)
    seen = ReplicaReport(reachable=True, slots=slots, metrics={"running": 3, "queued": 0, "tokens_total": 18211})
    replica_report(replica=begun.replica, report=seen)


def evaluate(run: Run, *, step_number: int, skill: float, luck: random.Random) -> None:
    """Evaluate the run's head on the held-out split."""
    run.lineage.refresh_from_db()
    assert run.lineage.head is not None
    evaluation = evaluation_request(
        project=run.project,
        version=run.lineage.head,
        task_set=TaskSet.objects.filter(project=run.project).latest("version"),
        rubric_version=RubricVersion.objects.filter(rubric__project=run.project).latest("number"),
        task_count=3,
        run=run,
        step_number=step_number,
    )
    evaluation_advance(evaluation.pk)
    for group in evaluation.groups.all():
        play_group(group, skill=skill, luck=luck)
    evaluation_advance(evaluation.pk)


def play(run: Run, steps: int, *, seed: int = 1, hostile: str = "") -> Run:
    """Play steps with a rising skill, evaluations before and after."""
    luck = random.Random(seed)
    evaluate(run, step_number=0, skill=0.2, luck=luck)
    for number in range(1, steps + 1):
        play_step(run, skill=min(0.95, 0.15 + 0.8 * number / max(steps, 1)), luck=luck, hostile=hostile)
    evaluate(run, step_number=steps, skill=0.9, luck=luck)
    run.refresh_from_db()
    return run


def kill_unit(run: Run, error: str = "the world did not start: no space left on device") -> WorkUnit:
    """Admit a group and let its rollout die for good: a dead letter."""
    stage = run.stages.get(position=0)
    run.lineage.refresh_from_db()
    group = admit(run, stage)[0]
    unit = WorkUnit.objects.get(kind=WorkKind.ROLLOUT, ref=group.pk)
    WorkUnit.objects.filter(pk=unit.pk).update(max_failures=1)
    work_fail(claim_of(WorkKind.ROLLOUT, group.pk), WorldError(error))
    unit.refresh_from_db()
    return unit
