"""What becomes known of tasks and of what was tried at them: proofs of task sets, tallies, how rollouts behaved."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.catalog import Task, TaskSet
from controlplane.models.runs import Rollout
from controlplane.models.weights import PolicyVersion
from controlplane.states import ProofState


class TaskSetProof(Entity):
    """Whether the tasks of a set hold: their tests were run before the fix and with the reference solution.

    `checked` counts tasks in the order of their ids. `findings` are those that do not hold: task, verdict, detail.
    """

    task_set = models.OneToOneField(TaskSet, on_delete=models.CASCADE, related_name="proof")
    state = models.CharField(max_length=12, choices=ProofState.choices, default=ProofState.PENDING)
    checked = models.PositiveIntegerField(default=0)
    findings = models.JSONField(default=list)
    finished_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.task_set_id}:{self.state}"


class TaskTally(models.Model):
    """What one policy version's attempts at one task came to. A pass is a full reward."""

    id = models.BigAutoField(primary_key=True)
    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="tallies")
    version = models.ForeignKey(PolicyVersion, on_delete=models.CASCADE, related_name="+")
    attempts = models.PositiveIntegerField(default=0)
    passes = models.PositiveIntegerField(default=0)
    rewards = models.FloatField(default=0.0, help_text="sum of the attempts' rewards")
    squares = models.FloatField(default=0.0, help_text="sum of their squares")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["task", "version"], name="tally_once")]

    def __str__(self) -> str:
        return f"{self.task_id}: {self.passes}/{self.attempts}"


class RolloutWatch(models.Model):
    """How one scored rollout behaved, as numbers of `rl_core.environments.watch`: nothing of what was said."""

    rollout = models.OneToOneField(Rollout, on_delete=models.CASCADE, primary_key=True, related_name="watch")
    environment = models.CharField(max_length=64)
    version = models.ForeignKey(PolicyVersion, null=True, on_delete=models.CASCADE, related_name="+")
    tokens = models.PositiveIntegerField()
    tool_calls = models.PositiveIntegerField()
    tool_errors = models.PositiveIntegerField()
    no_edit = models.BooleanField(null=True, help_text="null where there is nothing to edit")
    refusal = models.BooleanField()
    gap = models.FloatField(null=True, help_text="visible less hidden tests' share; null without tests")
    impossible_passed = models.BooleanField(null=True, help_text="null where the task can be solved")
    tests_touched = models.BooleanField()
    special_cased = models.BooleanField()
    early_exit = models.BooleanField()
    tampering = models.BooleanField()
    turns = models.JSONField(default=list, help_text="numbers of each turn, as `rl_core.environments.by_turn` has them")

    class Meta:
        indexes = [models.Index(fields=["environment", "version"])]

    def __str__(self) -> str:
        return str(self.rollout_id)
