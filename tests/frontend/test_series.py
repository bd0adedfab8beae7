"""Charts: the database's numbers, thinned without losing their shape."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.models import MetricPoint
from controlplane.selectors import thinning
from controlplane.selectors.api_runs import metric_series
from controlplane.selectors.pages_runs import spec_difference
from controlplane.selectors.pages_series import CHARTS, run_series
from controlplane.services.metrics import ENGINE_IDLE_OF


@pytest.mark.django_db
def test_charts_equal_the_database(played) -> None:
    workspace, run = played
    client = Client()
    client.force_login(workspace.owner)
    charts = {chart["key"]: chart for chart in client.get(reverse("run_series", args=[run.pk])).json()["charts"]}
    assert list(charts) == [chart.key for chart in CHARTS]
    lines = {line["name"]: line for line in charts["reward"]["lines"]}
    for step in run.steps.filter(version__isnull=False).order_by("number"):
        rewards = list(step.batch.values_list("reward", flat=True))
        index = lines["batch"]["x"].index(step.number)
        assert lines["batch"]["y"][index] == pytest.approx(sum(rewards) / len(rewards))
    heldout = dict(run.evaluations.values_list("step_number", "mean_reward"))
    assert dict(zip(lines["held-out"]["x"], lines["held-out"]["y"], strict=True)) == heldout
    assert {line["name"] for line in charts["versions"]["lines"]} == {"rollout-west", "rollout-east"}
    assert [line["y"][-1] for line in charts["versions"]["lines"]] == [2, 2]
    assert {line["name"] for line in charts["idle"]["lines"]} == {"trainer", "engines", "rollout-west", "rollout-east"}


@pytest.mark.django_db
def test_long_series_are_thinned(played) -> None:
    _, run = played
    MetricPoint.objects.bulk_create(
        [
            MetricPoint(run=run, name="grad_norm", step=step, value=step % 7, at=run.created_at)
            for step in range(10, 1010)
        ]
    )
    chart = next(chart for chart in run_series(run, limit=100) if chart["key"] == "gradient")
    assert len(chart["lines"][0]["x"]) == 100
    assert chart["lines"][0]["total"] == 1002


@pytest.mark.django_db
def test_series_that_are_written_together_are_each_thinned_evenly(played, monkeypatch) -> None:
    """Their ids interleave: counted by id, a stride that shares a factor with their number drops some altogether."""
    _, run = played
    monkeypatch.setattr(thinning, "RAW_LIMIT", 100)
    names = [f"{ENGINE_IDLE_OF}c{number}" for number in range(6)]
    began = timezone.now()
    MetricPoint.objects.bulk_create(
        MetricPoint(run=run, name=name, value=tick, at=began + timedelta(seconds=tick))
        for tick in range(300)
        for name in names
    )
    chart = next(chart for chart in run_series(run) if chart["key"] == "idle")
    drawn = {line["name"]: line for line in chart["lines"]}
    for number in range(6):
        line = drawn[f"c{number}"]
        assert (len(line["x"]), line["total"]) == (75, 300)
        assert (line["y"][0], line["y"][-1]) == (3, 299)
    [series] = metric_series(run_id=run.pk, names=names[:1], points=2000)
    assert (series["total"], len(series["points"])) == (300, 75)


def test_spec_difference_names_the_leaves_that_differ() -> None:
    a = {"seed": 1, "stages": [{"steps": 3, "loss": {"kind": "pg"}}], "only_a": True}
    b = {"seed": 2, "stages": [{"steps": 3, "loss": {"kind": "pg"}}, {"steps": 1}]}
    kinds = {row.path: row.kind for row in spec_difference(a, b)}
    assert kinds == {
        "seed": "changed",
        "stages[0].steps": "same",
        "stages[0].loss.kind": "same",
        "stages[1].steps": "added",
        "only_a": "removed",
    }
