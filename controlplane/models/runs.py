"""Runs, stages, steps, rollout groups, rollouts, scores, evaluations, metrics."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.catalog import RubricVersion, Task, TaskSet
from controlplane.models.tenancy import Project, User
from controlplane.models.weights import Lineage, PolicyVersion
from controlplane.states import (
    EvaluationState,
    GroupPurpose,
    GroupState,
    RolloutState,
    RunState,
    StageState,
    StepState,
)
from rl_core.types import Ending, Fault, Objective, StageKind

KINDS = [(kind.value, kind.value) for kind in StageKind]
ENDINGS = [(ending.value, ending.value) for ending in Ending]
FAULTS = [(fault.value, fault.value) for fault in Fault]
OBJECTIVES = [(objective.value, objective.value) for objective in Objective]


class Run(Entity):
    """One training effort. `spec` is the resolved run spec and never changes."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="runs")
    name = models.CharField(max_length=200)
    state = models.CharField(max_length=12, choices=RunState.choices, default=RunState.PENDING)
    spec = models.JSONField()
    lineage = models.OneToOneField(Lineage, on_delete=models.PROTECT, related_name="run")
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    checkpoint = models.CharField(max_length=1000, blank=True, help_text="folder of the newest whole checkpoint")
    checkpoint_step = models.PositiveIntegerField(default=0)
    state_reason = models.CharField(max_length=500, blank=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["project", "-created_at"])]

    def __str__(self) -> str:
        return self.name


class Stage(Entity):
    """One stage of a run, in order. Task set and rubric version are pinned when it starts."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="stages")
    position = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=12, choices=KINDS)
    state = models.CharField(max_length=12, choices=StageState.choices, default=StageState.PENDING)
    spec = models.JSONField()
    task_set = models.ForeignKey(TaskSet, null=True, on_delete=models.PROTECT, related_name="+")
    rubric_version = models.ForeignKey(RubricVersion, null=True, on_delete=models.PROTECT, related_name="+")
    admitted_groups = models.PositiveIntegerField(default=0)
    draws = models.PositiveIntegerField(default=0, help_text="cursor into the curriculum's sequence of tasks")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "position"], name="stage_position_once")]

    def __str__(self) -> str:
        return f"{self.position}:{self.kind}"


class Step(Entity):
    """One optimiser step of a run: a fixed batch, the version it started from, the version it made."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="steps")
    stage = models.ForeignKey(Stage, on_delete=models.CASCADE, related_name="steps")
    number = models.PositiveIntegerField(help_text="from 1, counted over all stages of the run")
    state = models.CharField(max_length=12, choices=StepState.choices, default=StepState.BATCHED)
    base_version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="+")
    version = models.OneToOneField(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="step")
    metrics = models.JSONField(default=dict)
    window = models.JSONField(default=dict, help_text="what a real-time stage's window held, and what was left out")
    published_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "number"], name="step_number_once")]

    def __str__(self) -> str:
        return str(self.number)


class Evaluation(Entity):
    """One version tried on the first `task_count` held-out tasks, one attempt each.

    Every version meets the same tasks with the same seeds, so that differences are paired.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="evaluations")
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="evaluations")
    version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="evaluations")
    task_set = models.ForeignKey(TaskSet, on_delete=models.PROTECT, related_name="+")
    rubric_version = models.ForeignKey(RubricVersion, on_delete=models.PROTECT, related_name="+")
    task_count = models.PositiveIntegerField()
    temperature = models.FloatField(default=0.0, help_text="of sampling; 0 is greedy")
    state = models.CharField(max_length=12, choices=EvaluationState.choices, default=EvaluationState.PENDING)
    mean_reward = models.FloatField(null=True)
    step_number = models.PositiveIntegerField(null=True, help_text="the run's step after which it was made; 0 before")
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["version", "task_set", "rubric_version", "task_count", "temperature"],
                name="evaluation_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.version_id}:{self.mean_reward}"


class RolloutGroup(Entity):
    """One task tried `size` times."""

    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="groups")
    stage = models.ForeignKey(Stage, null=True, on_delete=models.CASCADE, related_name="groups")
    evaluation = models.ForeignKey(Evaluation, null=True, on_delete=models.CASCADE, related_name="groups")
    step = models.ForeignKey(Step, null=True, on_delete=models.SET_NULL, related_name="groups")
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="groups")
    purpose = models.CharField(max_length=12, choices=GroupPurpose.choices)
    state = models.CharField(max_length=12, choices=GroupState.choices, default=GroupState.ADMITTED)
    position = models.PositiveIntegerField(help_text="order of admission within the stage or evaluation")
    draw = models.PositiveIntegerField(help_text="place in the curriculum; the same again when a lost group comes back")
    size = models.PositiveSmallIntegerField()
    seed = models.BigIntegerField()
    admitted_version = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="+")
    oldest_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    mean_reward = models.FloatField(null=True)
    reason = models.CharField(max_length=500, blank=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["stage", "position"], name="group_position_once"),
            models.UniqueConstraint(
                fields=["stage", "draw"],
                name="draw_counts_once",
                condition=~models.Q(state__in=[GroupState.DROPPED, GroupState.VOIDED]),
            ),
            models.UniqueConstraint(fields=["evaluation", "position"], name="evaluation_group_once"),
        ]
        indexes = [models.Index(fields=["run", "state"]), models.Index(fields=["evaluation", "state"])]

    def __str__(self) -> str:
        return f"{self.position}"


class Rollout(Entity):
    """One attempt at a task: a whole agent session. `trajectory_key` names its blob, after every turn a newer one."""

    group = models.ForeignKey(RolloutGroup, on_delete=models.CASCADE, related_name="rollouts")
    attempt = models.PositiveSmallIntegerField(help_text="0 … size-1 within the group")
    state = models.CharField(max_length=12, choices=RolloutState.choices, default=RolloutState.PENDING)
    replica = models.ForeignKey("controlplane.Replica", null=True, on_delete=models.SET_NULL, related_name="+")
    session_key = models.CharField(max_length=300, blank=True, help_text="blob of the session to go on from")
    trajectory_key = models.CharField(max_length=300, blank=True)
    oldest_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    newest_version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.PROTECT, related_name="+")
    turns = models.PositiveSmallIntegerField(default=0)
    sampled_tokens = models.PositiveIntegerField(default=0)
    prompt_tokens = models.PositiveIntegerField(default=0)
    ending = models.CharField(max_length=12, choices=ENDINGS, blank=True)
    fault = models.CharField(max_length=16, choices=FAULTS, blank=True)
    error = models.CharField(max_length=500, blank=True)
    reward = models.FloatField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["group", "attempt"], name="rollout_attempt_once")]

    def __str__(self) -> str:
        return f"{self.group_id}#{self.attempt}"


class CriterionScore(Entity):
    """What one criterion of one rubric version gave one rollout. An error is never a value."""

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="scores")
    rubric_version = models.ForeignKey(RubricVersion, on_delete=models.PROTECT, related_name="+")
    rubric_hash = models.CharField(max_length=64)
    criterion = models.CharField(max_length=64)
    value = models.FloatField(null=True)
    reason = models.TextField(blank=True)
    error = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rollout", "rubric_version", "criterion"], name="criterion_score_once")
        ]

    def __str__(self) -> str:
        return f"{self.criterion}={self.value}"


class BatchItem(Entity):
    """One trajectory consumed by one step: a rollout of a group, or a generation of a window.

    A real-time stage fixes what each is worth with its batch: `advantage` (under KTO +1 for liked, −1 for disliked)
    and `weight`. Without an advantage the trainer computes it from its group.
    """

    step = models.ForeignKey(Step, on_delete=models.CASCADE, related_name="batch")
    position = models.PositiveIntegerField()
    group_key = models.CharField(max_length=64)
    rollout = models.OneToOneField(Rollout, null=True, on_delete=models.PROTECT, related_name="batch_item")
    generation_id = models.UUIDField(null=True, db_index=True)
    returned_at = models.DateTimeField(null=True, help_text="a later window may take the generation since then")
    reward = models.FloatField()
    trajectory_key = models.CharField(max_length=300)
    objective = models.CharField(max_length=16, choices=OBJECTIVES, default=Objective.POLICY_GRADIENT.value)
    advantage = models.FloatField(null=True)
    weight = models.FloatField(default=1.0)
    feedback_id = models.UUIDField(null=True, help_text="the feedback whose demonstration is preferred, for DPO")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["step", "position"], name="batch_position_once"),
            models.UniqueConstraint(
                fields=["generation_id"],
                name="generation_in_one_batch",
                condition=models.Q(returned_at__isnull=True),
            ),
            models.CheckConstraint(
                name="batch_item_has_one_source",
                condition=models.Q(rollout__isnull=True) ^ models.Q(generation_id__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.step_id}[{self.position}]"


class MetricPoint(models.Model):
    """One value of one named series of a run. `step` is null for series over time (tokens a second, idle shares)."""

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="metric_points")
    name = models.CharField(max_length=80)
    step = models.PositiveIntegerField(null=True)
    value = models.FloatField()
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name", "step"], name="metric_once_per_step")]
        indexes = [models.Index(fields=["run", "name", "at"])]

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"
