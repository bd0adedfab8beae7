"""Charts: the database's numbers, thinned without losing their shape."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import MetricPoint
from controlplane.selectors.pages_runs import spec_difference
from controlplane.selectors.pages_series import CHARTS, run_series


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
