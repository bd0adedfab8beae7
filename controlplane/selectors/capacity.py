"""What a run's rows say of its pace: tokens, times and idle shares over its last steps, and the plan they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from django.db.models import Avg, Count, Q, Sum

from controlplane.models import BatchItem, Cluster, MetricPoint, Replica, Rollout, Run, Step
from controlplane.selectors.answering import there
from controlplane.services.metrics import ENGINE_IDLE_OF, MISMATCH_OF, Metric
from controlplane.states import StepState
from rl_core.capacity import Demand, Further, Measured, Plan, plan
from rl_core.types import ClusterRole

LAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class ClusterPace:
    """A cluster over the measured time. `k3` is the mismatch of what it sampled, mean over steps."""

    cluster: Cluster
    measured: Measured
    rollouts: int
    idle_known: bool
    k3: float | None


@dataclass(frozen=True, slots=True)
class DevicePace:
    """All clusters of one type of device. `tokens_s` are those of one device that is never idle."""

    device: str
    devices: int
    tokens_s: float
    k3: float | None
    dollars_million_tokens: float | None


@dataclass(frozen=True, slots=True)
class RunCapacity:
    """A run's pace and plan. Without a plan `missing` says what it still takes."""

    run: Run
    steps: int
    since: datetime | None = None
    step_s: float | None = None  # between two published steps
    trainer_idle_share: float | None = None
    demand: Demand | None = None
    clusters: tuple[ClusterPace, ...] = ()
    plan: Plan | None = None
    missing: str = ""

    @property
    def further(self) -> dict[str, Further]:
        """What one more replica of each cluster buys, by the cluster's slug."""
        return {more.cluster: more for more in self.plan.further} if self.plan else {}

    @property
    def task_dollars(self) -> dict[str, float | None]:
        """What of a task's cost each cluster is paid, by the cluster's slug."""
        if self.plan is None:
            return {}
        sampled = [pace.cluster.slug for pace in self.clusters if pace.measured.tokens_s > 0]
        return dict(zip(sampled, self.plan.task.cluster_dollars, strict=True))

    @property
    def unpriced(self) -> list[str]:
        """What has no price, so that a task has none."""
        if self.plan is None:
            return []
        clusters = [f"cluster {slug}" for slug, dollars in self.task_dollars.items() if dollars is None]
        return clusters + (["the trainer"] if self.plan.task.trainer_dollars is None else [])

    @property
    def devices(self) -> list[DevicePace]:
        """The pace of the clusters that sampled, by type of device."""
        sampled = [pace for pace in self.clusters if pace.measured.tokens_s > 0]
        types = sorted({pace.measured.device for pace in sampled})
        return [_of_device(name, [pace for pace in sampled if pace.measured.device == name]) for name in types]


@dataclass(frozen=True, slots=True)
class _Window:
    run: Run
    since: datetime
    until: datetime
    steps: list[Step]

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()


def capacity_of(run: Run, *, last_steps: int = LAST_STEPS) -> RunCapacity:
    """The plan of a run from its last steps; nine queries."""
    rows = run.steps.filter(state=StepState.PUBLISHED, published_at__isnull=False).order_by("-number")
    steps = list(rows[: last_steps + 1])
    if len(steps) < 2:
        return RunCapacity(run, len(steps), missing="two published steps say how long a step takes")
    window = _Window(run, _published(steps[-1]), _published(steps[0]), steps[:-1])
    if window.seconds <= 0:
        return RunCapacity(run, len(window.steps), missing="its steps were published at one moment")
    paces = _paces(window)
    demand = _demand(window, sum(pace.measured.tokens_s for pace in paces) * window.seconds)
    idle = _points(window).filter(name=Metric.TRAINER_IDLE).aggregate(mean=Avg("value"))["mean"]
    measured = [pace.measured for pace in paces if pace.measured.tokens_s > 0]
    seen: dict[str, Any] = {
        "since": window.since,
        "step_s": window.seconds / len(window.steps),
        "trainer_idle_share": idle,
        "clusters": tuple(paces),
    }
    if demand is None or not measured:
        return RunCapacity(run, len(window.steps), missing="none of its last steps trained on rollouts", **seen)
    return RunCapacity(run, len(window.steps), demand=demand, plan=plan(demand, measured), **seen)


def _published(step: Step) -> datetime:
    assert step.published_at is not None
    return step.published_at


def _points(window: _Window) -> Any:
    return MetricPoint.objects.filter(run=window.run, at__gt=window.since, at__lte=window.until)


def _demand(window: _Window, sampled_tokens: float) -> Demand | None:
    """What a step takes; None for steps without rollouts or without a time."""
    batch = BatchItem.objects.filter(step__in=window.steps, rollout__isnull=False)
    tokens = batch.aggregate(tokens=Sum("rollout__sampled_tokens"))["tokens"] or 0
    tasks = batch.values("step", "group_key").distinct().count()
    times = [step.metrics[Metric.STEP_S] for step in window.steps if step.metrics.get(Metric.STEP_S)]
    if not tokens or not times or not sampled_tokens:
        return None
    trainer = Cluster.objects.filter(project=window.run.project_id, role=ClusterRole.TRAINER.value).first()
    return Demand(
        step_tokens=tokens / len(window.steps),
        step_tasks=tasks / len(window.steps),
        train_s=median(times),
        useful_share=min(1.0, tokens / sampled_tokens),
        trainer_devices=trainer.devices if trainer else 1,
        trainer_dollars_device_hour=trainer.dollars_device_hour if trainer else None,
    )


def _paces(window: _Window) -> list[ClusterPace]:
    """Clusters that sampled for the run in its window, and those that hold its versions for it."""
    ours = Q(group__run=window.run) | Q(group__evaluation__run=window.run)
    finished = Rollout.objects.filter(ours, finished_at__gt=window.since, finished_at__lte=window.until)
    sampled: dict[Any, dict[str, Any]] = {
        row["replica__cluster"]: dict(row)
        for row in finished.exclude(replica=None)
        .values("replica__cluster")
        .annotate(tokens=Sum("sampled_tokens"), rollouts=Count("pk"), replicas=Count("replica", distinct=True))
    }
    names = _means(window)
    registered: dict[Any, int] = dict(
        Replica.objects.filter(there(), cluster__project=window.run.project_id)
        .values_list("cluster")
        .annotate(count=Count("pk"))
        .values_list("cluster", "count")
    )
    chosen = window.run.spec.get("rollout_clusters") or []
    wanted = Q(role=ClusterRole.ROLLOUT.value) & (Q(slug__in=chosen) if chosen else Q())
    rows = Cluster.objects.filter(Q(pk__in=sampled) | wanted, project=window.run.project_id).order_by("slug")
    return [
        _pace(cluster, sampled.get(cluster.pk, {}), registered.get(cluster.pk, 0), names, window)
        for cluster in rows
        if registered.get(cluster.pk)
    ]


def _means(window: _Window) -> dict[str, float]:
    named = Q(name__startswith=ENGINE_IDLE_OF) | Q(name__startswith=MISMATCH_OF)
    rows = _points(window).filter(named).values_list("name").annotate(mean=Avg("value"))
    return dict(rows.values_list("name", "mean"))


def _pace(
    cluster: Cluster, sampled: dict[str, Any], registered: int, means: dict[str, float], window: _Window
) -> ClusterPace:
    lends = cluster.role != ClusterRole.ROLLOUT.value  # only what it lent samples
    idle = means.get(f"{ENGINE_IDLE_OF}{cluster.slug}")
    measured = Measured(
        name=cluster.slug,
        replicas=sampled["replicas"] if lends else max(registered, sampled.get("replicas", 0)),
        tokens_s=(sampled.get("tokens") or 0) / window.seconds,
        idle_share=min(1.0, max(0.0, idle or 0.0)),
        device=cluster.device,
        devices=cluster.devices,
        dollars_device_hour=cluster.dollars_device_hour,
    )
    k3 = means.get(f"{MISMATCH_OF}{cluster.slug}")
    return ClusterPace(cluster, measured, sampled.get("rollouts", 0), idle is not None, k3)


def _of_device(device: str, paces: Sequence[ClusterPace]) -> DevicePace:
    devices = sum(pace.measured.all_devices for pace in paces)
    weighed = [(pace.k3, pace.rollouts) for pace in paces if pace.k3 is not None and pace.rollouts]
    total = sum(weight for _, weight in weighed)
    capacity = sum(pace.measured.capacity_tokens_s for pace in paces)
    hourly = [pace.measured.dollars_hour for pace in paces if pace.measured.dollars_hour is not None]
    return DevicePace(
        device=device,
        devices=devices,
        tokens_s=capacity / devices,
        k3=sum(k3 * weight for k3, weight in weighed) / total if total else None,
        dollars_million_tokens=1e6 * sum(hourly) / 3600 / capacity if len(hourly) == len(paces) else None,
    )
