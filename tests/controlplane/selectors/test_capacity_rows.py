"""The planner's figures are those of the rows: made by hand here, and computed by hand."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from django.db.models import F, Value
from django.db.models.functions import Now
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import BatchItem, Cluster, MetricPoint, Replica, Rollout, Run, Step
from controlplane.selectors.capacity import capacity_of
from controlplane.selectors.pages_capacity import capacity_view
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_configure, cluster_create
from controlplane.services.metrics import ENGINE_IDLE_OF, MISMATCH_OF, Metric
from controlplane.states import RunState
from rl_core.capacity import Limit
from rl_core.types import ClusterRole
from tests.factories import Workspace, furnish, make_workspace
from tests.playing import play_step, start_run

pytestmark = pytest.mark.django_db
STEP_S = 50.0


@pytest.fixture
def workspace() -> Workspace:
    return furnish(make_workspace(), train=12)


@pytest.fixture
def measured(workspace: Workspace) -> Run:
    """Three steps, 50 s apart, of 2 tasks with 4 attempts of 100 tokens each; the trainer takes 20 s.

    Of the last two steps' 16 rollouts the west made 12 and the east 4. Both were idle for a fifth of the time.
    """
    run = start_run(workspace, steps=6)
    for _ in range(3):
        play_step(run, skill=0.5, luck=random.Random(1))
    steps = list(run.steps.order_by("number"))
    west, east = (Replica.objects.get(cluster__slug=f"rollout-{side}") for side in ("west", "east"))
    MetricPoint.objects.filter(run=run).delete()
    moment = timezone.now()
    for place, step in enumerate(steps):
        published = moment - timedelta(seconds=STEP_S * (2 - place))
        Step.objects.filter(pk=step.pk).update(published_at=published, metrics={Metric.STEP_S: 20.0})
        rollouts = list(Rollout.objects.filter(group__step=step).order_by("pk"))
        for number, rollout in enumerate(rollouts):
            Rollout.objects.filter(pk=rollout.pk).update(
                sampled_tokens=100,
                replica=east if number < 2 else west,
                finished_at=published - timedelta(seconds=10),
            )
    for name, value in (
        (f"{ENGINE_IDLE_OF}rollout-west", 0.2),
        (f"{ENGINE_IDLE_OF}rollout-east", 0.2),
        (f"{MISMATCH_OF}rollout-west", 4e-4),
        (Metric.TRAINER_IDLE, 0.55),
    ):
        MetricPoint.objects.create(run=run, name=name, value=value, at=moment - timedelta(seconds=5))
    for slug, device in (("rollout-west", "H200"), ("rollout-east", "MI300X")):
        cluster = Cluster.objects.get(project=workspace.project, slug=slug)
        cluster_configure(
            cluster=cluster, actor=SYSTEM, reason="priced", device=device, devices=2, dollars_device_hour=4.5
        )
    return run


def test_a_plan_is_what_the_rows_say(measured: Run) -> None:
    seen = capacity_of(measured)
    assert (seen.steps, seen.step_s, seen.trainer_idle_share) == (2, pytest.approx(STEP_S), 0.55)
    assert seen.demand is not None
    assert (seen.demand.step_tokens, seen.demand.step_tasks, seen.demand.train_s) == (800, 2, 20)
    assert seen.demand.useful_share == 1
    paces = {pace.cluster.slug: pace for pace in seen.clusters}
    assert paces["rollout-west"].measured.tokens_s == pytest.approx(1200 / 100)
    assert paces["rollout-east"].measured.tokens_s == pytest.approx(400 / 100)
    assert (paces["rollout-west"].rollouts, paces["rollout-west"].k3) == (12, pytest.approx(4e-4))
    assert paces["rollout-east"].k3 is None
    assert seen.plan is not None
    assert seen.plan.limit is Limit.ROLLOUTS
    assert seen.plan.needed_tokens_s == pytest.approx(40)
    assert seen.plan.capacity_tokens_s == pytest.approx(20)
    assert seen.further["rollout-west"].tokens_s == pytest.approx(15)
    assert seen.further["rollout-west"].step_s == pytest.approx(800 / 35)
    assert [(pace.device, pace.devices, pace.tokens_s) for pace in seen.devices] == [
        ("H200", 2, pytest.approx(7.5)),
        ("MI300X", 2, pytest.approx(2.5)),
    ]


def test_what_is_sampled_in_vain_is_asked_for_too(measured: Run) -> None:
    """A quarter of what was sampled in the time reached no step."""
    item = BatchItem.objects.filter(step__number=3).values_list("pk", flat=True)[:4]
    BatchItem.objects.filter(pk__in=list(item)).delete()
    seen = capacity_of(measured)
    assert seen.demand is not None
    assert (seen.demand.step_tokens, seen.demand.useful_share) == (600, 0.75)
    assert seen.demand.needed_tokens_s == pytest.approx(40)


def test_prices_of_both_sides_make_a_sum(measured: Run, workspace: Workspace) -> None:
    assert capacity_of(measured).plan.task.dollars is None  # type: ignore[union-attr]
    trainer = cluster_create(
        project=workspace.project, slug="trainer", role=ClusterRole.TRAINER, region="eu", capacity=1, actor=SYSTEM
    )
    cluster_configure(cluster=trainer, actor=SYSTEM, reason="priced", devices=8, dollars_device_hour=9.0)
    plan = capacity_of(measured).plan
    assert plan is not None
    assert plan.task.trainer_device_s == pytest.approx(8 * 20 / 2)
    assert plan.task.dollars == pytest.approx((4 * 4.5 + 8 * 9.0) * plan.step_s / 3600 / 2)
    seen = capacity_of(measured)
    assert seen.task_dollars == dict.fromkeys(("rollout-east", "rollout-west"), pytest.approx(9 * 40 / 3600 / 2))
    assert seen.unpriced == []
    # Two H200 at $4.50 sample 15 tokens a second between them, two MI300X 5: $9 an hour for 54,000 and for 18,000.
    prices = {pace.device: pace.dollars_million_tokens for pace in seen.devices}
    assert prices == {"H200": pytest.approx(9 / 0.054), "MI300X": pytest.approx(9 / 0.018)}


def test_what_has_no_price_is_named(measured: Run) -> None:
    assert capacity_of(measured).unpriced == ["the trainer"]
    Cluster.objects.filter(slug="rollout-east").update(dollars_device_hour=None)
    seen = capacity_of(measured)
    assert seen.unpriced == ["cluster rollout-east", "the trainer"]
    unpriced = [(pace.device, pace.dollars_million_tokens is None) for pace in seen.devices]
    assert unpriced == [("H200", False), ("MI300X", True)]


def test_old_steps_and_other_runs_do_not_count(measured: Run, workspace: Workspace) -> None:
    other = start_run(workspace, name="Other", steps=2)
    Rollout.objects.filter(group__step__number=1).update(sampled_tokens=1_000_000)  # before the window
    assert capacity_of(other).missing == "two published steps say how long a step takes"
    assert capacity_of(other).plan is None
    assert capacity_of(measured).plan.capacity_tokens_s == pytest.approx(20)  # type: ignore[union-attr]
    assert capacity_of(measured, last_steps=1).step_s == pytest.approx(STEP_S)


def test_steps_of_one_moment_and_steps_without_rollouts_have_no_plan(measured: Run) -> None:
    Rollout.objects.filter(group__run=measured).update(finished_at=F("finished_at") - Value(timedelta(days=1)))
    seen = capacity_of(measured)
    assert (seen.plan, seen.missing) == (None, "none of its last steps trained on rollouts")
    measured.steps.update(published_at=Now())
    assert capacity_of(measured).missing == "its steps were published at one moment"


def test_the_page_plans_for_running_runs_and_else_for_the_last(measured: Run, workspace: Workspace) -> None:
    newer = start_run(workspace, name="Newer", steps=2)
    assert [one.run for one in capacity_view(workspace.project)] == [newer, measured]
    Run.objects.update(state=RunState.STOPPED)
    assert [one.run for one in capacity_view(workspace.project)] == [measured]


def test_the_api_answers_with_the_plan(measured: Run, workspace: Workspace) -> None:
    client = APIClient()
    client.force_login(workspace.people["viewer"])
    address = f"/api/v1/projects/{workspace.project.slug}/runs/{measured.pk}/capacity"
    body = client.get(address).json()
    assert body["plan"]["needed_tokens_s"] == pytest.approx(40)
    assert body["plan"]["limit"] == "rollouts"
    assert (body["step_s"], body["train_s"], body["trainer_idle_share"]) == (pytest.approx(STEP_S), 20, 0.55)
    west = next(one for one in body["clusters"] if one["cluster"] == "rollout-west")
    assert (west["device"], west["idle_share"], west["k3"]) == ("H200", 0.2, pytest.approx(4e-4))
    assert west["further"]["tokens_s"] == pytest.approx(15)
    assert west["further"]["replicas_to_balance"] == 2
    assert (west["task_dollars"], west["dollars_million_tokens"]) == (pytest.approx(0.05), pytest.approx(9 / 0.054))
    run = start_run(workspace, name="Other", steps=2)
    empty = client.get(f"/api/v1/projects/{workspace.project.slug}/runs/{run.pk}/capacity").json()
    assert (empty["plan"], empty["train_s"], empty["clusters"]) == (None, None, [])
    other = APIClient()
    other.force_login(make_workspace().owner)
    assert other.get(address).status_code == 404
