"""How hard tasks are, from what was tried: by task over all policy versions, and of one task over time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from django.db.models import F, FloatField, Q, QuerySet, Sum, Value
from django.db.models.functions import Coalesce

from controlplane.models import Rollout, Task, TaskSet, TaskTally
from rl_core.curriculum import Difficulty, Tries, difficulty
from rl_core.specs import CurriculumSpec

BINS = 10
PRIOR = CurriculumSpec().prior_attempts
PAGE = 50


class TaskOrder(StrEnum):
    """How the tasks of a set are listed."""

    FILE = "file"
    HARDEST = "hardest"
    EASIEST = "easiest"


@dataclass(frozen=True, slots=True)
class TriedTask:
    """A task and what is believed of it."""

    task: Task
    attempts: int
    passes: int
    known: Difficulty

    @property
    def pass_rate(self) -> float | None:
        """The share of attempts with a full reward; None before the first."""
        return self.passes / self.attempts if self.attempts else None


@dataclass(frozen=True, slots=True)
class TaskSetDifficulty:
    """How many tasks of a split were tried, and how many have a mean reward in each tenth of [0, 1]."""

    tasks: int
    tried: int
    attempts: int
    histogram: list[int]


@dataclass(frozen=True, slots=True)
class VersionTally:
    """One policy version's attempts at a task."""

    version: str
    number: int
    run: str
    run_id: UUID | None
    attempts: int
    passes: int
    mean_reward: float


def set_difficulty(task_set: TaskSet, *, split: str) -> TaskSetDifficulty:
    """The histogram of mean rewards of a split's tasks."""
    rows = list(
        TaskTally.objects.filter(task__task_set=task_set, task__split=split)
        .values("task")
        .annotate(n=Sum("attempts"), total=Sum("rewards"))
        .values_list("n", "total")
    )
    histogram = [0] * BINS
    for n, total in rows:
        histogram[min(BINS - 1, max(0, int(total / n * BINS)))] += 1
    tasks = task_set.tasks.filter(split=split).count()
    return TaskSetDifficulty(tasks, len(rows), sum(n for n, _ in rows), histogram)


def tried_tasks(task_set: TaskSet, *, split: str, order: TaskOrder, after: int) -> tuple[list[TriedTask], int | None]:
    """A page of a split's tasks from the `after`-th on, and where the next begins. By rate, tried ones come first."""
    rows = _summed(Task.objects.filter(task_set=task_set, split=split)).annotate(
        mean=F("total") / Coalesce(F("n"), Value(1.0), output_field=FloatField())
    )
    if order is TaskOrder.FILE:
        ordered = rows.order_by("position")
    else:
        by_mean = F("mean").asc(nulls_last=True) if order is TaskOrder.HARDEST else F("mean").desc(nulls_last=True)
        ordered = rows.order_by(by_mean, "position")
    found = list(ordered[after : after + PAGE + 1])
    return [_tried(row) for row in found[:PAGE]], after + PAGE if len(found) > PAGE else None


def tried_task(task: Task) -> TriedTask:
    """One task with what is believed of it."""
    return _tried(_summed(Task.objects.filter(pk=task.pk)).get())


def history_of(task: Task) -> list[VersionTally]:
    """A task's tallies by policy version, oldest first."""
    rows = (
        TaskTally.objects.filter(task=task)
        .select_related("version__lineage__run")
        .order_by("version__created_at", "pk")
    )
    found = []
    for row in rows:
        run = getattr(row.version.lineage, "run", None)
        found.append(
            VersionTally(
                version=str(row.version.ref),
                number=row.version.number,
                run=run.name if run else "",
                run_id=run.pk if run else None,
                attempts=row.attempts,
                passes=row.passes,
                mean_reward=row.rewards / row.attempts,
            )
        )
    return found


def attempts_at(task: Task, *, limit: int = PAGE) -> list[Rollout]:
    """The newest attempts at a task, whatever became of them."""
    rows = Rollout.objects.filter(group__task=task).select_related("group__run", "newest_version", "watch")
    return list(rows.order_by("-pk")[:limit])


def _summed(tasks: QuerySet[Task]) -> QuerySet[Task]:
    tried = Q(tallies__attempts__gt=0)
    return tasks.annotate(
        n=Sum("tallies__attempts", filter=tried),
        passed=Sum("tallies__passes", filter=tried),
        total=Sum("tallies__rewards", filter=tried),
        squared=Sum("tallies__squares", filter=tried),
    )


def _tried(row: Task) -> TriedTask:
    counts = {name: getattr(row, name) or 0 for name in ("n", "passed", "total", "squared")}
    known = difficulty(Tries(counts["n"], counts["total"], counts["squared"]), prior=PRIOR)
    return TriedTask(row, counts["n"], counts["passed"], known)
