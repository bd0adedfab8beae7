"""Reads for the pages: runs, their progress, their steps, and what differs between two."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Max, Q, QuerySet

from controlplane.models import Cluster, MetricPoint, ModelCard, PolicyVersion, Project, Rubric, Run, Step, TaskSet
from controlplane.selectors.pages_series import REWARD
from controlplane.services.events import run_topic
from controlplane.states import RunState, StepState, VersionState
from rl_core.types import ClusterRole

PAGE = 50
_SPARK_POINTS = 48


@dataclass(frozen=True, slots=True)
class RunFilter:
    """What the runs page was asked for. Empty means all. `before` is the id of the last run of the page before."""

    text: str = ""
    state: str = ""
    model: str = ""
    before: UUID | None = None


@dataclass(slots=True)
class RunRow:
    """A run with what a list shows of it."""

    run: Run
    step: int
    steps: int
    rewards: list[float]

    @property
    def last_reward(self) -> float | None:
        """The newest batch reward."""
        return self.rewards[-1] if self.rewards else None


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, newest first, and the id before which older ones lie (None: there are none)."""

    rows: list[RunRow]
    older: UUID | None


def steps_planned(run: Run) -> int:
    """How many steps the spec asks for, all stages together. A real-time stage is one step: its window's."""
    return sum(int(stage.get("steps", 1)) for stage in run.spec.get("stages", []))


def runs_page(project: Project, wanted: RunFilter, size: int = PAGE) -> RunPage:
    """One page of a project's runs, newest first."""
    query = Q(project=project)
    if wanted.text:
        query &= Q(name__icontains=wanted.text)
    if wanted.state:
        query &= Q(state=wanted.state)
    if wanted.model:
        query &= Q(spec__model=wanted.model)
    if wanted.before is not None:
        query &= Q(pk__lt=wanted.before)
    runs = list(Run.objects.filter(query).select_related("created_by").order_by("-pk")[: size + 1])
    return RunPage(run_rows(runs[:size]), runs[size - 1].pk if len(runs) > size else None)


def run_rows(runs: list[Run]) -> list[RunRow]:
    """The runs with progress and rewards, in three queries however many they are."""
    done = dict(
        Step.objects.filter(run__in=runs, state=StepState.PUBLISHED)
        .values("run_id")
        .annotate(last=Max("number"))
        .values_list("run_id", "last")
    )
    rewards = _sparks({run.pk: done.get(run.pk, 0) for run in runs})
    return [RunRow(run, done.get(run.pk, 0), steps_planned(run), rewards.get(run.pk, [])) for run in runs]


def _sparks(last_step: dict[UUID, int]) -> dict[UUID, list[float]]:
    """A few dozen rewards of each run, evenly spread, its newest among them."""
    by_stride: dict[int, list[UUID]] = defaultdict(list)
    for run_id, last in last_step.items():
        by_stride[max(1, last // _SPARK_POINTS)].append(run_id)
    sparks: dict[UUID, list[float]] = defaultdict(list)
    for stride, run_ids in by_stride.items():
        newest = Q()
        for run_id in run_ids:
            newest |= Q(run_id=run_id, step=last_step[run_id])
        points = (
            MetricPoint.objects.filter(run_id__in=run_ids, name=REWARD, step__isnull=False)
            .annotate(phase=F("step") % stride)
            .filter(Q(phase=1 % stride) | newest)
            .order_by("run_id", "step")
        )
        for run_id, value in points.values_list("run_id", "value"):
            sparks[run_id].append(value)
    return sparks


def run_steps(run: Run, size: int = 30) -> list[Step]:
    """The newest steps of a run, newest first."""
    return list(run.steps.select_related("version", "base_version", "stage").order_by("-number")[:size])


def run_versions(run: Run, size: int = 30) -> list[PolicyVersion]:
    """The newest versions of a run's lineage, newest first."""
    return list(run.lineage.versions.order_by("-epoch", "-number")[:size])


def run_counts(run: Run) -> dict[str, int]:
    """How many groups of the run are in each state, and how many versions were committed."""
    counts = dict(run.groups.values("state").annotate(n=Count("pk")).values_list("state", "n"))
    committed = run.lineage.versions.filter(state=VersionState.COMMITTED, number__gt=0).count()
    return {**counts, "versions": committed}


def forks_of(run: Run) -> QuerySet[Run]:
    """Runs that started from one of this run's versions."""
    return Run.objects.filter(project=run.project, lineage__parent__lineage=run.lineage_id).order_by("-pk")


def parent_run_of(run: Run) -> Run | None:
    """The run this one was forked from."""
    parent = run.lineage.parent
    return Run.objects.filter(project=run.project, lineage=parent.lineage_id).first() if parent else None


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf of two specs. `kind` is same, changed, added (only in b) or removed (only in a)."""

    path: str
    a: Any
    b: Any
    kind: str


_ABSENT = object()


def spec_difference(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """The leaves of two specs side by side, by path."""
    left, right = _leaves(a), _leaves(b)
    rows = []
    for path in sorted(left | right):
        one, two = left.get(path, _ABSENT), right.get(path, _ABSENT)
        if one is _ABSENT:
            rows.append(Difference(path, "", two, "added"))
        elif two is _ABSENT:
            rows.append(Difference(path, one, "", "removed"))
        else:
            rows.append(Difference(path, one, two, "same" if one == two else "changed"))
    return rows


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        children = [(f"{path}.{key}" if path else str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and value:
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    else:
        return {path: value}
    leaves: dict[str, Any] = {}
    for child_path, child in children:
        leaves |= _leaves(child, child_path)
    return leaves


def rubric_hashes(run: Run) -> list[str]:
    """The rubric versions that the run's stages were scored by: rewards compare only under equal ones."""
    return list(run.stages.exclude(rubric_version=None).values_list("rubric_version__content_hash", flat=True))


@dataclass(frozen=True, slots=True)
class RunIngredients:
    """What a new run of a project can be made of."""

    models: list[str]
    task_sets: list[TaskSet]
    rubrics: list[str]
    clusters: list[str]

    @property
    def missing(self) -> list[str]:
        """What the project lacks before a run can be made."""
        named = {
            "model": self.models,
            "task set": self.task_sets,
            "rubric": self.rubrics,
            "rollout cluster": self.clusters,
        }
        return [name for name, found in named.items() if not found]


def run_ingredients(project: Project) -> RunIngredients:
    """Models, newest task sets, published rubrics and rollout clusters of the project."""
    newest: dict[str, TaskSet] = {}
    for task_set in TaskSet.objects.filter(project=project).order_by("slug", "version"):
        newest[task_set.slug] = task_set
    return RunIngredients(
        models=list(ModelCard.objects.filter(project=project).order_by("-created_at").values_list("slug", flat=True)),
        task_sets=list(newest.values()),
        rubrics=list(
            Rubric.objects.filter(project=project, versions__isnull=False)
            .distinct()
            .order_by("slug")
            .values_list("slug", flat=True)
        ),
        clusters=list(
            Cluster.objects.filter(project=project, role=ClusterRole.ROLLOUT.value)
            .order_by("slug")
            .values_list("slug", flat=True)
        ),
    )


_GOING = (RunState.PENDING, RunState.RUNNING, RunState.PAUSED)
_MAX_FOLLOWED = 40


def going_topics(project: Project) -> list[str]:
    """The topics of the newest runs that go on, for a page that follows them all."""
    runs = Run.objects.filter(project=project, state__in=_GOING).order_by("-pk")
    return [run_topic(run_id) for run_id in runs.values_list("pk", flat=True)[:_MAX_FOLLOWED]]


def going_runs(project: Project) -> list[RunRow]:
    """Runs that go on or wait for somebody, newest first."""
    return run_rows(list(Run.objects.filter(project=project, state__in=_GOING).order_by("-pk")[:20]))


def run_names(project: Project, size: int = 200) -> list[Run]:
    """The newest runs with their names alone, for choosing one."""
    return list(Run.objects.filter(project=project).only("pk", "name").order_by("-pk")[:size])
