"""A project as people see it: members, catalogue, clusters, and runs played through the services workers call.

`play_step` does what the conductor and the workers do for one step, service by service, so that rows and events are
those of a real run; only the numbers are made up. Trajectories are real blobs in the object store.
"""

from __future__ import annotations

import math
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
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
    User,
    WorkUnit,
)
from controlplane.services.catalog import model_register, rubric_publish, task_set_create
from controlplane.services.evaluations import evaluation_advance, evaluation_request
from controlplane.services.events import CONDUCTOR, SYSTEM, Actor
from controlplane.services.fleet import (
    ReplicaReport,
    SlotReport,
    cluster_create,
    replica_register,
    replica_report,
    slot_target,
)
from controlplane.services.groups import groups_admit
from controlplane.services.metrics import CLUSTER_VERSION, ENGINE_IDLE_OF, Metric, metrics_record
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
from controlplane.services.tenancy import project_create, user_create
from controlplane.services.transfers import TransferReport, transfer_begin, transfer_done
from controlplane.services.versions import PublishedWeights
from controlplane.services.work import Claim, work_claim, work_fail
from controlplane.states import ActorKind, DesiredSource, MemberRole, RunState, StageState, WeightSlot, WorkKind
from rl_core.environments.tasks import Task
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.errors import WorldError
from rl_core.store import open_store
from rl_core.types import (
    ClusterRole,
    Ending,
    Message,
    Role,
    SamplingParams,
    Split,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

PASSWORD = "launch-the-ship-42"
FULL_BYTES = 269_060_000
ELEMENTS = 134_515_008
HOSTILE = '<script>alert("x")</script>\x1b[31mred\u202egnp.exe & <b onmouseover=alert(1)>'
TESTER = Actor(ActorKind.SYSTEM, "tests")

CRITERIA: list[dict[str, Any]] = [
    {"key": "tool_ran", "text": "The calculator ran", "kind": "tool_ran", "weight": 0.2, "tier": "optional"},
    {"key": "tool_result_right", "text": "Its result is right", "kind": "tool_result_right", "weight": 0.3},
    {
        "key": "final_number_right",
        "text": "The answer states the right number",
        "kind": "final_number_right",
        "weight": 0.5,
        "tier": "essential",
    },
]


@dataclass
class Workspace:
    """A project with people. `run` is added by `play`."""

    project: Project
    owner: User
    people: dict[str, User] = field(default_factory=dict)
    clusters: list[Cluster] = field(default_factory=list)


def make_workspace(name: str = "Acme agents", slug: str = "") -> Workspace:
    """An empty project with one login for each role; every password is `PASSWORD`."""
    slug = slug or f"acme-{uuid.uuid4().hex[:6]}"
    project = project_create(slug=slug, name=name, actor=SYSTEM)
    people = {
        role.value: user_create(
            project=project, username=f"{role.value}-{slug}", password=PASSWORD, role=role, actor=SYSTEM
        )
        for role in MemberRole
    }
    return Workspace(project, people["owner"], people)


def furnish(workspace: Workspace, *, train: int = 40, heldout: int = 6, model_folder: Path | None = None) -> Workspace:
    """Add a model, a task set, a rubric and two rollout clusters, ready."""
    project = workspace.project
    folder = model_folder or Path("/nowhere")
    card = model_register(
        project=project,
        slug="smollm2-135m",
        folder=str(folder),
        root=_digest("base"),
        manifest_key="snapshots/base/manifest.json",
        full_bytes=FULL_BYTES,
        parameters=ELEMENTS,
        architecture="LlamaForCausalLM",
        actor=SYSTEM,
    )
    tasks = [_task(Split.TRAIN, n) for n in range(train)] + [_task(Split.HELDOUT, n) for n in range(heldout)]
    task_set_create(
        project=project, slug="word-problems", environment="word-problems", tasks=TaskList(tuple(tasks)), actor=SYSTEM
    )
    rubric_publish(
        project=project, slug="word-problems", criteria=CRITERIA, author=workspace.owner, note="first", actor=SYSTEM
    )
    for slug, region in (("rollout-west", "us-west"), ("rollout-east", "eu-central")):
        cluster = cluster_create(
            project=project,
            slug=slug,
            role=ClusterRole.ROLLOUT,
            region=region,
            capacity=32,
            model=card,
            local=True,
            actor=SYSTEM,
        )
        replica_register(
            cluster=cluster,
            name="engine-1",
            inference_url="http://127.0.0.1:1",
            control_url="http://127.0.0.1:2",
            actor=SYSTEM,
        )
        workspace.clusters.append(cluster)
    return workspace


def _task(split: Split, number: int) -> Task:
    a, b = 41 + number % 59, 12 + number % 29
    text = f"There are {a} boxes with {b} pens in each. How many pens are there? ({split.value} {number})"
    return Task(
        id=f"{split.value}-boxes-{number:04d}",
        split=split,
        input={"question": text},
        reference={"answer": str(a * b), "expression": f"{a}*{b}"},
    )


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
    groups = _admit(run, stage)
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
            root=_digest(str(version.pk)),
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


def _admit(run: Run, stage: Stage) -> list[RolloutGroup]:
    tasks = TaskSet.objects.filter(project=run.project).latest("version").tasks.filter(split=Split.TRAIN.value)
    first = stage.admitted_groups
    count = int(stage.spec["prompts_per_step"])
    chosen = list(tasks.order_by("position")[first % 30 : first % 30 + count])
    assert run.lineage.head is not None
    return groups_admit(
        run=run,
        stage=stage,
        tasks=chosen,
        size=int(stage.spec["group_size"]),
        version=run.lineage.head,
        run_seed=1,
    )


def play_group(group: RolloutGroup, *, skill: float, luck: random.Random, hostile: str = "") -> None:
    """Roll out and score one group."""
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
    score = claim_of(WorkKind.SCORE, group.pk)
    scoring = score_begin(score)
    assert scoring is not None
    rubric = RubricVersion.objects.filter(rubric__project=group.task.task_set.project).latest("number")
    score_record(score, rubric_version=rubric, results=[_scores(pk, *outcome) for pk, outcome in outcomes.items()])


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


def make_trajectory(
    group: RolloutGroup, *, seed: int = 0, ran: bool = True, right: bool = True, hostile: str = ""
) -> Trajectory:
    """Two turns with a calculator; sampled tokens of two versions. `hostile` is put wherever a model could write."""
    luck = random.Random(seed)
    solution = int(group.task.reference["answer"])
    expression = group.task.reference["expression"] if ran else "forty-one times twelve"
    answer = f"Answer: {solution if right else solution + 1}{hostile}"
    texts = [
        (Role.SYSTEM, "Solve word problems with a calculator. Reply <calc>EXPRESSION</calc> to use it."),
        (Role.USER, group.task.input["question"]),
        (Role.ASSISTANT, f"<calc>{expression}</calc>"),
        (Role.TOOL, str(solution) if ran else "not an expression"),
        (Role.ASSISTANT, answer),
    ]
    head = group.admitted_version
    older = head.parent if head.parent is not None and head.parent.lineage_id == head.lineage_id else head
    prompt, first, result, second = 30, 9, 6, 7
    total = prompt + first + result + second
    mask = [0] * prompt + [1] * first + [0] * result + [1] * second
    logprobs = [math.log(luck.uniform(0.02, 1.0) ** 2) if on else 0.0 for on in mask]
    segment = TokenSegment(
        token_ids=[luck.randrange(100, 20_000) for _ in range(total)],
        loss_mask=mask,
        logprobs=logprobs,
        spans=[
            VersionSpan(prompt, prompt + 4, str(older.ref)),
            VersionSpan(prompt + 4, prompt + first, str(head.ref)),
            VersionSpan(total - second, total, str(head.ref)),
        ],
        sampling=SamplingParams(max_tokens=20),
    )
    bounds = [
        (0, 12),
        (12, prompt),
        (prompt, prompt + first),
        (prompt + first, total - second),
        (total - second, total),
    ]
    return Trajectory(
        task_id=group.task.key,
        messages=[
            Message(role=role, content=text, parent=index - 1, segment=0, start=bounds[index][0], end=bounds[index][1])
            for index, (role, text) in enumerate(texts)
        ],
        segments=[segment],
        tool_calls=[ToolCall(tool="calc", arguments=expression + hostile, result=str(solution), ok=ran, turn=0)],
        ending=Ending.TERMINATED,
        artifacts={"note.txt": hostile} if hostile else {},
    )


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
    slots = {transfer.slot: SlotReport(str(begun.version.ref), begun.version.root)}
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
    group = _admit(run, stage)[0]
    unit = WorkUnit.objects.get(kind=WorkKind.ROLLOUT, ref=group.pk)
    WorkUnit.objects.filter(pk=unit.pk).update(max_failures=1)
    work_fail(claim_of(WorkKind.ROLLOUT, group.pk), WorldError(error))
    unit.refresh_from_db()
    return unit


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()
