"""The whole conductor under workers that crash, lapse, repeat and reorder: the run completes, nothing counts twice."""

import random

import pytest
from django.db.models import Count
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.models import BatchItem, MetricPoint, PolicyVersion, RolloutGroup, Run, WorkUnit
from controlplane.states import EvaluationState, GroupState, RunState, StepState, VersionState, WorkState
from tests.domain_factories import make_run
from tests.simulated_workers import Simulation

STEPS, PROMPTS, ATTEMPTS, STALENESS = 3, 2, 2, 1
SEEDS = given(seed=st.integers(min_value=0, max_value=2**32), eval_every=st.sampled_from([0, 2]))
LOOSE = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.mark.django_db
@settings(max_examples=3, **LOOSE)
@SEEDS
def test_a_run_completes_and_every_step_counts_once(seed: int, eval_every: int):
    simulate(seed, eval_every)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.django_db
@settings(max_examples=40, **LOOSE)
@SEEDS
def test_many_runs_complete_and_every_step_counts_once(seed: int, eval_every: int):
    simulate(seed, eval_every)


def simulate(seed: int, eval_every: int) -> None:
    run = make_run(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=ATTEMPTS,
        max_staleness=STALENESS,
        eval_every=eval_every,
        eval_tasks=2,
    )
    Simulation(run, random.Random(seed)).go(rounds=3000)
    assert run.state == RunState.COMPLETED, run.state_reason
    check_whole(run)


def check_whole(run: Run) -> None:
    steps = list(run.steps.order_by("number").select_related("version", "base_version"))
    assert [step.number for step in steps] == list(range(1, STEPS + 1))
    assert {step.state for step in steps} == {StepState.PUBLISHED}
    versions = PolicyVersion.objects.filter(lineage=run.lineage).order_by("number")
    assert [version.number for version in versions] == list(range(STEPS + 1))
    assert {version.state for version in versions} == {VersionState.COMMITTED}
    assert [step.version.parent_id for step in steps] == [step.base_version_id for step in steps]
    assert [step.version.number for step in steps] == [step.number for step in steps]
    run.lineage.refresh_from_db()
    assert run.lineage.head == steps[-1].version
    items = BatchItem.objects.filter(step__run=run)
    assert items.count() == STEPS * PROMPTS * ATTEMPTS
    assert items.values("rollout").distinct().count() == items.count()
    points = MetricPoint.objects.filter(run=run, step__isnull=False).values("name", "step").annotate(n=Count("pk"))
    assert {point["n"] for point in points} == {1}
    consumed = RolloutGroup.objects.filter(run=run, stage__isnull=False, state=GroupState.CONSUMED)
    for group in consumed.select_related("step__base_version", "oldest_version"):
        assert group.step.base_version.number - group.oldest_version.number <= STALENESS
    assert set(run.evaluations.values_list("state", flat=True)) == {EvaluationState.DONE}
    assert run.evaluations.filter(step_number__in=[0, STEPS]).count() == 2
    assert not WorkUnit.objects.filter(run=run, state=WorkState.LEASED).exists()
    # A group whose worker died too often was given up whole, and its dead letter stays for a person to see.
    dead = WorkUnit.objects.filter(run=run, state=WorkState.DEAD)
    groups = RolloutGroup.objects.filter(pk__in=dead.values("ref"))
    assert {group.state for group in groups} <= {GroupState.VOIDED}
    assert groups.count() == dead.count()
