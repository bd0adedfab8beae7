"""Reads for the pages: a run's charts, thinned on the server so that a page stays quick however long the run is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from django.db.models import Count, Q

from controlplane.models import MetricPoint, Run
from controlplane.selectors import thinning
from controlplane.selectors.lttb import lttb
from controlplane.services.metrics import CLUSTER_VERSION, ENGINE_IDLE_OF, MISMATCH_OF, Metric

REWARD = Metric.REWARD_MEAN.value
Point = tuple[float, float]
MAX_POINTS = 2000


class Axis(StrEnum):
    """What a chart's x counts."""

    STEP = "step"
    TIME = "time"


class Unit(StrEnum):
    """How a chart's values are written."""

    NUMBER = "number"
    SHARE = "share"
    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: which series it draws, by name, or all whose name begins with a prefix."""

    key: str
    title: str
    hint: str
    axis: Axis
    unit: Unit = Unit.NUMBER
    lines: dict[str, str] = field(default_factory=dict)  # metric name → label
    prefix: str = ""  # the rest of the name is the label
    stepped: bool = False  # a value holds until the next


CHARTS: tuple[Chart, ...] = (
    Chart(
        "reward",
        "Reward",
        "Mean of each step's batch, and of the held-out split",
        Axis.STEP,
        lines={REWARD: "batch", Metric.HELDOUT_REWARD.value: "held-out"},
    ),
    Chart(
        "mismatch",
        "Mismatch",
        "Trainer against engine logprobs on sampled tokens",
        Axis.STEP,
        lines={"k1_behaviour": "k1", "k3_behaviour": "k3"},
        prefix=MISMATCH_OF,  # k3 of each cluster
    ),
    Chart(
        "staleness",
        "Staleness",
        "Policy versions between a batch's tokens and its step",
        Axis.STEP,
        lines={Metric.STALENESS_MEAN.value: "mean", Metric.STALENESS_MAX.value: "max"},
    ),
    Chart(
        "tokens",
        "Throughput",
        "Sampled tokens a second, all rollout clusters",
        Axis.TIME,
        lines={Metric.TOKENS_PER_S.value: "tokens/s"},
    ),
    Chart(
        "idle",
        "Idle share",
        "Share of time that trainer and engines had nothing to do",
        Axis.TIME,
        Unit.SHARE,
        lines={Metric.TRAINER_IDLE.value: "trainer", Metric.ENGINE_IDLE.value: "engines"},
        prefix=ENGINE_IDLE_OF,
    ),
    Chart(
        "versions",
        "Version per cluster",
        "The version number that each cluster serves",
        Axis.TIME,
        prefix=CLUSTER_VERSION,
        stepped=True,
    ),
    Chart(
        "delta",
        "Delta size",
        "Bytes of each published version",
        Axis.STEP,
        Unit.BYTES,
        lines={Metric.DELTA_BYTES.value: "delta"},
    ),
    Chart(
        "ratio",
        "Delta ratio",
        "Full weights over delta: how many times smaller",
        Axis.STEP,
        lines={Metric.DELTA_RATIO.value: "full / delta"},
    ),
    Chart(
        "step_time",
        "Step time",
        "Seconds of the trainer in each step, publishing included",
        Axis.STEP,
        Unit.SECONDS,
        lines={Metric.STEP_S.value: "step"},
    ),
    Chart("entropy", "Entropy", "Of the policy on trained tokens, nats", Axis.STEP, lines={"entropy": "entropy"}),
    Chart("gradient", "Gradient norm", "Before clipping", Axis.STEP, lines={"grad_norm": "norm"}),
    Chart(
        "weights",
        "Importance weights",
        "Shares of tokens masked, capped, or routed differently by trainer and engine",
        Axis.STEP,
        Unit.SHARE,
        lines={"share_masked": "masked", "share_capped": "capped", "routing_disagreement": "routed differently"},
    ),
)


def run_series(run: Run, limit: int = MAX_POINTS) -> list[dict[str, Any]]:
    """Every chart of a run as JSON data: `{key, title, hint, axis, unit, stepped, lines: [{name, x, y, total}]}`.

    x is a step number, or milliseconds since 1970 UTC. `total` is how many points there are before thinning.
    """
    points, totals = _points_of(run)
    return [
        {
            "key": chart.key,
            "title": chart.title,
            "hint": chart.hint,
            "axis": chart.axis.value,
            "unit": chart.unit.value,
            "stepped": chart.stepped,
            "lines": [
                _line(label, points[(name, chart.axis)], totals[(name, chart.axis)], limit)
                for name, label in _labels(chart, points)
            ],
        }
        for chart in CHARTS
    ]


_Key = tuple[str, Axis]


def _labels(chart: Chart, points: dict[_Key, list[Point]]) -> list[tuple[str, str]]:
    """The chart's series that have points, named first, then those of its prefix by name."""
    named = [(name, label) for name, label in chart.lines.items() if (name, chart.axis) in points]
    if not chart.prefix:
        return named
    found = sorted(name for name, axis in points if axis is chart.axis and name.startswith(chart.prefix))
    return named + [(name, name.removeprefix(chart.prefix)) for name in found]


def _line(label: str, points: list[Point], total: int, limit: int) -> dict[str, Any]:
    kept = [points[index] for index in lttb([x for x, _ in points], [y for _, y in points], limit)]
    return {"name": label, "x": [x for x, _ in kept], "y": [y for _, y in kept], "total": total}


def _points_of(run: Run) -> tuple[dict[_Key, list[Point]], dict[_Key, int]]:
    """The points of every charted series, in order, and how many each has in all."""
    wanted = Q(name__in=[name for chart in CHARTS for name in chart.lines])
    for chart in CHARTS:
        if chart.prefix:
            wanted |= Q(name__startswith=chart.prefix)
    rows = MetricPoint.objects.filter(wanted, run=run)
    counts = dict(rows.values("name").annotate(n=Count("pk")).values_list("name", "n"))
    for name, count in counts.items():
        if count > thinning.RAW_LIMIT:
            kept = thinning.points_thinned(MetricPoint.objects.filter(run=run, name=name), count)
            rows = rows.exclude(Q(name=name) & ~Q(pk__in=kept.values("pk")))
    points: dict[_Key, list[Point]] = defaultdict(list)
    for name, step, at, value in rows.order_by("step", "at", "pk").values_list("name", "step", "at", "value"):
        if step is None:
            points[(name, Axis.TIME)].append((round(at.timestamp() * 1000), value))
        else:
            points[(name, Axis.STEP)].append((step, value))
    return points, {key: max(len(found), counts.get(key[0], 0)) for key, found in points.items()}
