"""What runs are made of: models, task sets, rubrics."""

from __future__ import annotations

from django.db import models

from controlplane.models.base import Entity
from controlplane.models.tenancy import Project, User
from rl_core.types import Split

SPLITS = [(split.value, split.value) for split in Split]


class ModelCard(Entity):
    """A model of the catalogue: a Hugging Face folder, its root, and its snapshot in the object store."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="models")
    slug = models.SlugField(max_length=64)
    folder = models.CharField(max_length=1000)
    root = models.CharField(max_length=64)
    manifest_key = models.CharField(max_length=300)
    full_bytes = models.BigIntegerField()
    parameters = models.BigIntegerField()
    architecture = models.CharField(max_length=100)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="model_slug_once")]

    def __str__(self) -> str:
        return self.slug


class TaskSet(Entity):
    """A versioned list of tasks for an environment. Immutable once created."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="task_sets")
    slug = models.SlugField(max_length=64)
    version = models.PositiveIntegerField()
    environment = models.SlugField(max_length=64)
    content_hash = models.CharField(max_length=64)
    train_count = models.PositiveIntegerField()
    heldout_count = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug", "version"], name="task_set_version_once")]

    def __str__(self) -> str:
        return f"{self.slug}@{self.version}"


class Task(Entity):
    """One problem of a task set."""

    task_set = models.ForeignKey(TaskSet, on_delete=models.CASCADE, related_name="tasks")
    key = models.CharField(max_length=200)
    split = models.CharField(max_length=8, choices=SPLITS)
    position = models.PositiveIntegerField()
    input = models.JSONField()
    reference = models.JSONField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["task_set", "key"], name="task_key_once"),
            models.UniqueConstraint(fields=["task_set", "split", "position"], name="task_position_once"),
        ]

    def __str__(self) -> str:
        return self.key


class Rubric(Entity):
    """A name under which rubric versions are published."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rubrics")
    slug = models.SlugField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "slug"], name="rubric_slug_once")]

    def __str__(self) -> str:
        return self.slug


class RubricVersion(Entity):
    """Authored grading, immutable and hashed. `criteria` is the list `rl_core.environments.reward` reads."""

    rubric = models.ForeignKey(Rubric, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    content_hash = models.CharField(max_length=64)
    criteria = models.JSONField()
    author = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    note = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rubric", "number"], name="rubric_number_once"),
            models.UniqueConstraint(fields=["rubric", "content_hash"], name="rubric_content_once"),
        ]

    def __str__(self) -> str:
        return f"{self.rubric_id}@{self.number}"
