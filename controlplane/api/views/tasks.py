"""What is known of tasks and environments: proofs, difficulty, histories, the cheating watch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from controlplane.api.base import DetailView, one
from controlplane.api.serializers.catalog import (
    EnvironmentWatchSerializer,
    TaskHistorySerializer,
    TaskSetReportSerializer,
)
from controlplane.errors import NotFound
from controlplane.models import Task, TaskSet, TaskSetProof
from controlplane.selectors import api_catalog as select
from controlplane.selectors.difficulty import history_of, set_difficulty, tried_task
from controlplane.selectors.environment_watch import watch_of
from controlplane.selectors.environments import environment_of
from rl_core.types import Split


class TaskSetReport(DetailView):
    """The proof of one version of a task set, and how hard its tasks are."""

    serializer_class = TaskSetReportSerializer

    def row(self) -> dict[str, Any]:
        """The report of the set of the path."""
        task_set: TaskSet = one(select.task_sets_of(self.project), "task set", pk=self.kwargs["id"])
        proof = TaskSetProof.objects.filter(task_set=task_set).first()
        return {
            "proof": proof.state if proof else None,
            "checked": proof.checked if proof else 0,
            "findings": proof.findings if proof else [],
            **asdict(set_difficulty(task_set, split=Split.TRAIN.value)),
        }


class TaskHistory(DetailView):
    """One task over policy versions."""

    serializer_class = TaskHistorySerializer

    def row(self) -> dict[str, Any]:
        """The history of the task of the path."""
        task: Task = one(select.tasks_of(self.project), "task", pk=self.kwargs["id"])
        tried = tried_task(task)
        return {
            "attempts": tried.attempts,
            "passes": tried.passes,
            "known": tried.known,
            "versions": history_of(task),
        }


class EnvironmentWatch(DetailView):
    """The cheating watch of an environment."""

    serializer_class = EnvironmentWatchSerializer

    def row(self) -> dict[str, Any]:
        """The watch of the environment of the path."""
        if environment_of(self.project.pk, self.kwargs["slug"]) is None:
            raise NotFound("neither this build nor the project knows such an environment")
        seen = watch_of(self.project, self.kwargs["slug"])
        versions = [
            {
                "version": {"ref": str(row.version.ref)},
                "rollouts": row.rollouts,
                "signs": {sign.value: share.value for sign, share in row.shares.items()},
            }
            for row in seen.versions
        ]
        compared = str(seen.compared_version.ref) if seen.compared_version else None
        return {"versions": versions, "compared_version": compared, "compared": seen.compared}
