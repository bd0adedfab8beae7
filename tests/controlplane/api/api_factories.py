"""Rows for tests of the API and the live stream."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import (
    ApiKey,
    Attempt,
    Cluster,
    CriterionScore,
    Evaluation,
    Export,
    ExportFile,
    ExportPart,
    Lineage,
    MetricPoint,
    ModelCard,
    PolicyVersion,
    Project,
    Replica,
    ReplicaSlot,
    Rollout,
    RolloutGroup,
    Rubric,
    RubricVersion,
    Run,
    Stage,
    Step,
    Task,
    TaskSet,
    Transfer,
    User,
    WorkUnit,
)
from controlplane.services.events import SYSTEM
from controlplane.services.tenancy import api_key_create, membership_set, project_create
from controlplane.states import MemberRole, RunState, Scope, StageState, StepState, VersionState, WorkKind, WorkState
from rl_core.store import open_store
from rl_core.types import (
    Ending,
    Message,
    Role,
    Routes,
    SamplingParams,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

_count = itertools.count(1)

CRITERIA = [{"key": "right", "text": "the answer is right", "kind": "exact", "weight": 1, "params": {"text": "4"}}]
TASKS = [
    {"id": "t1", "split": "train", "input": {"question": "2+2"}, "reference": {"answer": "4"}},
    {"id": "h1", "split": "heldout", "input": {"question": "3+3"}, "reference": {"answer": "6"}},
]


def make_project(slug: str = "") -> Project:
    return project_create(slug=slug or f"project-{next(_count)}", name="A project", actor=SYSTEM)


def make_user(project: Project | None = None, role: MemberRole = MemberRole.OWNER) -> User:
    user = User.objects.create_user(username=f"user{next(_count)}")
    if project is not None:
        membership_set(project=project, user=user, role=role, actor=SYSTEM)
    return user


def make_key(project: Project, *scopes: Scope) -> tuple[ApiKey, str]:
    return api_key_create(project=project, name="test", scopes=scopes or tuple(Scope), actor=SYSTEM)


def client_of(credentials: User | str | None = None) -> APIClient:
    """A client of a user's session, or of a key's text, or of nobody."""
    client = APIClient()
    if isinstance(credentials, str):
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {credentials}")
    elif credentials is not None:
        client.force_login(credentials)
    return client


@dataclass
class World:
    """One row of every kind in one project."""

    project: Project
    model: ModelCard
    task_set: TaskSet
    task: Task
    rubric: Rubric
    rubric_version: RubricVersion
    cluster: Cluster
    replica: Replica
    run: Run
    version: PolicyVersion
    stage: Stage
    step: Step
    evaluation: Evaluation
    group: RolloutGroup
    rollout: Rollout
    transfer: Transfer
    export: Export
    unit: WorkUnit
    dead: WorkUnit
    attempt: Attempt

    @property
    def base(self) -> str:
        return f"/api/v1/projects/{self.project.slug}"


def make_catalog(project: Project) -> tuple[ModelCard, TaskSet, Rubric, RubricVersion]:
    model = ModelCard.objects.create(
        project=project,
        slug="tiny",
        folder="/nowhere/secret-folder",
        root="a" * 64,
        manifest_key="snapshots/a/manifest.json",
        full_bytes=1000,
        parameters=10,
        architecture="llama",
    )
    task_set = TaskSet.objects.create(
        project=project,
        slug="sums",
        version=1,
        environment="word-problems",
        content_hash="b" * 64,
        train_count=1,
        heldout_count=1,
    )
    for task in TASKS:
        Task.objects.create(
            task_set=task_set,
            key=task["id"],
            split=task["split"],
            position=0,
            input=task["input"],
            reference=task["reference"],
        )
    rubric = Rubric.objects.create(project=project, slug="sums")
    rubric_version = RubricVersion.objects.create(rubric=rubric, number=1, content_hash="c" * 64, criteria=CRITERIA)
    return model, task_set, rubric, rubric_version


def make_lineage(project: Project, model: ModelCard) -> tuple[Lineage, PolicyVersion]:
    lineage = Lineage.objects.create(project=project, model=model)
    version = make_version(lineage, 0)
    lineage.head = version
    lineage.save()
    return lineage, version


def make_version(lineage: Lineage, number: int) -> PolicyVersion:
    return PolicyVersion.objects.create(
        lineage=lineage,
        epoch=0,
        number=number,
        state=VersionState.COMMITTED,
        root=f"{number:064x}",
        manifest_key=f"lineages/{lineage.pk}/0-{number}/manifest.json",
        committed_at=timezone.now(),
    )


def make_run(project: Project, model: ModelCard, state: RunState = RunState.RUNNING) -> Run:
    lineage, _ = make_lineage(project, model)
    return Run.objects.create(project=project, name="a run", spec={"model": model.slug}, lineage=lineage, state=state)


def make_export(version: PolicyVersion, content: bytes = b"{}") -> Export:
    """An export of one file that stands in the store in two parts."""
    export = Export.objects.create(version=version, format="fp8-block", bytes=len(content), written_at=timezone.now())
    digest = hashlib.sha256(content).hexdigest()
    file = ExportFile.objects.create(export=export, name="config.json", bytes=len(content), sha256=digest)
    store = open_store(settings.STORE_URL)
    for position, part in enumerate((content[:1], content[1:])):
        ExportPart.objects.create(file=file, position=position, blob_key=store.put_blob(part), bytes=len(part))
    return export


def make_trajectory() -> Trajectory:
    segment = TokenSegment(
        token_ids=[1, 2, 3, 4],
        loss_mask=[0, 0, 1, 1],
        logprobs=[0.0, 0.0, -0.5, -0.25],
        spans=[VersionSpan(2, 4, "l:0-0")],
        sampling=SamplingParams(),
        routes=Routes(tokens=3, layers=1, top_k=1, dtype="uint8", data=b"\x00\x01\x02"),
    )
    return Trajectory(
        task_id="t1",
        messages=[
            Message(role=Role.USER, content="2+2"),
            Message(role=Role.ASSISTANT, content="<script>4</script>", parent=0, segment=0, start=2, end=4),
        ],
        segments=[segment],
        tool_calls=[ToolCall(tool="calculator", arguments="2+2", result="4", ok=True, turn=0)],
        ending=Ending.TERMINATED,
        artifacts={"candidate": "x"},
    )


def make_world(project: Project | None = None) -> World:
    project = project or make_project()
    model, task_set, rubric, rubric_version = make_catalog(project)
    run = make_run(project, model)
    version = PolicyVersion.objects.get(lineage=run.lineage, number=0)
    cluster = Cluster.objects.create(project=project, slug="eu", role="rollout", region="eu", capacity=8, model=model)
    replica = Replica.objects.create(cluster=cluster, name="r0", inference_url="http://127.0.0.1:1")
    ReplicaSlot.objects.create(replica=replica, slot="default", current_version=version)
    stage = Stage.objects.create(run=run, position=0, kind="rl", spec={}, state=StageState.RUNNING)
    step = Step.objects.create(
        run=run,
        stage=stage,
        number=1,
        base_version=version,
        version=make_version(run.lineage, 1),
        state=StepState.PUBLISHED,
    )
    evaluation = Evaluation.objects.create(
        project=project, run=run, version=version, task_set=task_set, rubric_version=rubric_version, task_count=1
    )
    task = Task.objects.get(task_set=task_set, split="train")
    group = RolloutGroup.objects.create(
        run=run,
        stage=stage,
        step=step,
        task=task,
        purpose="train",
        position=0,
        draw=0,
        size=1,
        seed=0,
        admitted_version=version,
    )
    key = open_store(settings.STORE_URL).put_blob(make_trajectory().to_bytes())
    rollout = Rollout.objects.create(
        group=group,
        attempt=0,
        replica=replica,
        trajectory_key=key,
        reward=1.0,
        oldest_version=version,
        newest_version=version,
    )
    CriterionScore.objects.create(
        rollout=rollout, rubric_version=rubric_version, rubric_hash="c" * 64, criterion="right", value=1.0
    )
    MetricPoint.objects.create(run=run, name="reward_mean", step=1, value=0.5, at=timezone.now())
    transfer = Transfer.objects.create(replica=replica, slot="default", version=version)
    export = make_export(version)
    unit = WorkUnit.objects.create(kind=WorkKind.ROLLOUT, ref=group.pk, run=run, project=project)
    dead = WorkUnit.objects.create(
        kind=WorkKind.TRAIN, ref=step.pk, run=run, project=project, state=WorkState.DEAD, failures=5
    )
    attempt = Attempt.objects.create(unit=dead, number=1, worker="w")
    return World(
        project,
        model,
        task_set,
        task,
        rubric,
        rubric_version,
        cluster,
        replica,
        run,
        version,
        stage,
        step,
        evaluation,
        group,
        rollout,
        transfer,
        export,
        unit,
        dead,
        attempt,
    )


def run_body(world: World, **stage: Any) -> dict[str, Any]:
    """A body that creates a run in the world's project."""
    spec = {"kind": "rl", "environment": "word-problems", "task_set": "sums", "rubric": "sums", **stage}
    return {"name": "from the API", "spec": {"model": world.model.slug, "stages": [spec]}}
