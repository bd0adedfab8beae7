"""Rows for tests of the domain: small, valid, and made by the services where a service makes them."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from django.db import models
from django.db.models import TextChoices
from django.utils import timezone

from controlplane.models import (
    CadenceSlot,
    Cluster,
    Evaluation,
    Feedback,
    Lane,
    Loan,
    ModelCard,
    PolicyVersion,
    Project,
    Release,
    Replica,
    Rollout,
    RolloutGroup,
    RubricVersion,
    Run,
    SignalDefinition,
    Stage,
    Step,
    TaskSet,
    TaskSetProof,
    Transfer,
    WorkUnit,
)
from controlplane.services.catalog import model_register, rubric_publish, task_set_create
from controlplane.services.events import Actor
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.runs import run_create
from controlplane.states import (
    ActorKind,
    EvaluationState,
    FeedbackState,
    GroupPurpose,
    GroupState,
    LoanState,
    ProofState,
    ReleaseState,
    ReplicaState,
    RolloutState,
    RunState,
    SlotState,
    StageState,
    StepState,
    TransferState,
    VersionState,
    WorkKind,
    WorkState,
)
from rl_core.environments.tasks import Task as TaskItem
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.types import ClusterRole, Split

TESTER = Actor(ActorKind.USER, "tester")
ROOT = "a" * 64
_numbers = itertools.count(1)


def make_project() -> Project:
    """A project of its own."""
    return Project.objects.create(slug=f"p-{next(_numbers)}-{uuid.uuid4().hex[:6]}", name="Test")


def make_model(project: Project, *, slug: str = "tiny", folder: str = "/nowhere", root: str = ROOT) -> ModelCard:
    """A model of the catalogue; its folder is only read by workers."""
    return model_register(
        project=project,
        slug=slug,
        folder=folder,
        root=root,
        manifest_key=f"snapshots/{slug}/manifest.json",
        full_bytes=1_000_000,
        parameters=1000,
        architecture="LlamaForCausalLM",
        actor=TESTER,
    )


def make_tasks(*, train: int = 12, heldout: int = 3) -> TaskList:
    """Sums to do."""
    counts = ((Split.TRAIN, train), (Split.HELDOUT, heldout))
    return TaskList(
        tuple(
            TaskItem(
                id=f"{split.value}-{n}", split=split, input={"question": f"{split.value} {n}"}, reference={"answer": n}
            )
            for split, count in counts
            for n in range(count)
        )
    )


CRITERIA: list[dict[str, Any]] = [{"key": "ran", "text": "a call ran", "kind": "tool_ran", "weight": 1.0}]


def make_catalog(project: Project, *, train: int = 12, heldout: int = 3) -> tuple[ModelCard, TaskSet, RubricVersion]:
    """A model, a task set and a rubric under the names that `make_spec` uses."""
    model = make_model(project)
    tasks = make_tasks(train=train, heldout=heldout)
    task_set = task_set_create(
        project=project, slug="word-problems", environment="word-problems", tasks=tasks, actor=TESTER
    )
    rubric = rubric_publish(
        project=project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=TESTER
    )
    return model, task_set, rubric


def make_spec(**stage: Any) -> dict[str, Any]:
    """A small spec: two prompts a step, two attempts, three steps."""
    values = {"steps": 3, "prompts_per_step": 2, "group_size": 2, "eval_tasks": 3, "max_staleness": 1} | stage
    return {"model": "tiny", "seed": 7, "stages": [{"kind": "rl", **values}]}


def make_cluster(
    project: Project,
    *,
    slug: str = "east",
    capacity: int = 8,
    replicas: int = 1,
    role: ClusterRole = ClusterRole.ROLLOUT,
) -> Cluster:
    """A cluster whose replicas are ready, as if they had been looked at."""
    cluster = cluster_create(project=project, slug=slug, role=role, region="here", capacity=capacity, actor=TESTER)
    for number in range(replicas):
        replica = replica_register(
            cluster=cluster,
            name=f"{slug}-{number}",
            inference_url="http://127.0.0.1:1",
            control_url="http://127.0.0.1:2",
            actor=TESTER,
        )
        Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
    return cluster


def make_run(project: Project | None = None, *, spec: dict[str, Any] | None = None, **stage: Any) -> Run:
    """A run with its catalogue and two clusters, not yet started."""
    project = project or make_project()
    if not ModelCard.objects.filter(project=project).exists():
        make_catalog(project)
        make_cluster(project, slug="east")
        make_cluster(project, slug="west")
    return run_create(project=project, name="a run", spec=spec or make_spec(**stage), actor=TESTER)


def make_unit(project: Project | None = None, *, kind: WorkKind = WorkKind.EXPORT, **values: Any) -> WorkUnit:
    """A queued unit about nothing in particular."""
    project = project or make_project()
    return WorkUnit.objects.create(kind=kind, ref=uuid.uuid4(), project=project, **values)


def make_group(run: Run, *, state: GroupState = GroupState.ADMITTED, **values: Any) -> RolloutGroup:
    """A training group of the run's first stage."""
    stage = run.stages.get(position=0)
    task_set = TaskSet.objects.get(project=run.project)
    defaults: dict[str, Any] = {
        "run": run,
        "stage": stage,
        "task": task_set.tasks.filter(split=Split.TRAIN.value).first(),
        "purpose": GroupPurpose.TRAIN,
        "state": state,
        "position": stage.groups.count(),
        "draw": values.get("position", stage.groups.count()),
        "size": 2,
        "seed": 1,
        "admitted_version": run.lineage.head,
    }
    return RolloutGroup.objects.create(**(defaults | values))


def make_row(kind: type[TextChoices], state: TextChoices) -> models.Model:
    """A row of the table whose life cycle `kind` is, in the given state."""
    return _ROWS[kind](state)


def _run(state: TextChoices) -> Run:
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=state)
    run.refresh_from_db()
    return run


def _stage(state: TextChoices) -> Stage:
    stage = make_run().stages.get()
    Stage.objects.filter(pk=stage.pk).update(state=state)
    stage.refresh_from_db()
    return stage


def _step(state: TextChoices) -> Step:
    run = make_run()
    return Step.objects.create(run=run, stage=run.stages.get(), number=1, state=state, base_version=run.lineage.head)


def _group(state: TextChoices) -> RolloutGroup:
    return make_group(make_run(), state=GroupState(state))


def _rollout(state: TextChoices) -> Rollout:
    return Rollout.objects.create(group=make_group(make_run()), attempt=0, state=state)


def _version(state: TextChoices) -> PolicyVersion:
    lineage = make_run().lineage
    whole = {"root": ROOT, "manifest_key": "m", "committed_at": timezone.now()}
    return PolicyVersion.objects.create(
        lineage=lineage, epoch=0, number=1, state=state, **(whole if state == VersionState.COMMITTED else {})
    )


def _transfer(state: TextChoices) -> Transfer:
    run = make_run()
    replica = Replica.objects.filter(cluster__project=run.project).first()
    return Transfer.objects.create(replica=replica, slot="default", version=run.lineage.head, state=state)


def _evaluation(state: TextChoices) -> Evaluation:
    run = make_run()
    return Evaluation.objects.create(
        project=run.project,
        version=run.lineage.head,
        task_set=TaskSet.objects.get(project=run.project),
        rubric_version=RubricVersion.objects.get(rubric__project=run.project),
        task_count=3,
        state=state,
    )


def _replica(state: TextChoices) -> Replica:
    replica = Replica.objects.get(cluster=make_cluster(make_project()))
    Replica.objects.filter(pk=replica.pk).update(state=state)
    replica.refresh_from_db()
    return replica


def _loan(state: TextChoices) -> Loan:
    run = make_run()
    replica = Replica.objects.filter(cluster__project=run.project).first()
    return Loan.objects.create(replica=replica, run=run, slot="candidate", sessions=4, reason="test", state=state)


def _release(state: TextChoices) -> Release:
    run = make_run()
    cluster = make_cluster(run.project, slug="serving")
    lane = Lane.objects.create(project=run.project, slug="lane", cluster=cluster, model=run.lineage.model, salt="salt")
    return Release.objects.create(lane=lane, version=run.lineage.head, state=state, reason="test")


def _slot(state: TextChoices) -> CadenceSlot:
    lane, now = _release(ReleaseState.SKIPPED).lane, timezone.now()
    return CadenceSlot.objects.create(lane=lane, number=1, state=state, due_at=now, deadline_at=now)


def _unit(state: TextChoices) -> WorkUnit:
    return make_unit(state=state)


def _feedback(state: TextChoices) -> Feedback:
    project = make_project()
    signal = SignalDefinition.objects.create(project=project, slug="thumbs", value_type="boolean")
    return Feedback.objects.create(
        project=project,
        sender="test",
        signal=signal,
        state=state,
        target_kind="generation",
        target_id="x",
        occurred_at=timezone.now(),
    )


def _proof(state: TextChoices) -> TaskSetProof:
    _, task_set, _ = make_catalog(make_project())
    return TaskSetProof.objects.create(task_set=task_set, state=state)


_ROWS: dict[type[TextChoices], Any] = {
    RunState: _run,
    StageState: _stage,
    StepState: _step,
    GroupState: _group,
    RolloutState: _rollout,
    VersionState: _version,
    TransferState: _transfer,
    EvaluationState: _evaluation,
    ReplicaState: _replica,
    LoanState: _loan,
    ProofState: _proof,
    ReleaseState: _release,
    SlotState: _slot,
    WorkState: _unit,
    FeedbackState: _feedback,
}
