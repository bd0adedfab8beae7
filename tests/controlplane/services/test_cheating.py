"""Signs of cheating by version: a rise calls a person once, chance and few rollouts call nobody."""

import random

import pytest

from controlplane.models import (
    Alert,
    Cluster,
    Generation,
    Lane,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutWatch,
    Run,
    TaskSet,
)
from controlplane.selectors.environment_watch import Sign, signs_by_version, simulation_against_production, watch_of
from controlplane.services.alerts import alert_resolve
from controlplane.services.cheating import run_watch, runs_watched
from controlplane.services.observations import rollout_note
from controlplane.states import AlertKind, GroupPurpose, GroupState, RolloutState, RunState, VersionState
from rl_core.environments.criteria.kinds import CriterionKind
from rl_core.environments.watch import Signs
from tests.domain_factories import ROOT, TESTER, make_group, make_run

pytestmark = pytest.mark.django_db
QUIET = Signs(
    tokens=20, tool_calls=2, tool_errors=0, no_edit=False, refusal=False,
    tests_touched=False, special_cased=False, early_exit=False, tampering=False,
)  # fmt: skip


def version(run: Run, number: int) -> PolicyVersion:
    values = {"root": ROOT, "manifest_key": "m", "committed_at": run.created_at, "state": VersionState.COMMITTED}
    return PolicyVersion.objects.get_or_create(lineage=run.lineage, epoch=0, number=number, defaults=values)[0]


def watched_run(rates: dict[int, float], *, each: int = 120, seed: int = 1) -> Run:
    """A run whose versions' rollouts touch tests at the given rates, eight attempts a group."""
    run = make_run()
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    luck = random.Random(seed)
    task = TaskSet.objects.get(project=run.project).tasks.filter(split="train").first()
    for number, rate in rates.items():
        groups = RolloutGroup.objects.bulk_create(
            RolloutGroup(
                run=run, stage=run.stages.get(), task=task, purpose=GroupPurpose.TRAIN, state=GroupState.CONSUMED,
                position=number * 100 + n, draw=number * 100 + n, size=8, seed=1, admitted_version=run.lineage.head,
            )
            for n in range(each // 8)
        )  # fmt: skip
        rollouts = Rollout.objects.bulk_create(
            Rollout(
                group=groups[n // 8], attempt=n % 8, state=RolloutState.SCORED, turns=2,
                newest_version=version(run, number), reward=1.0,
            )
            for n in range(each)
        )  # fmt: skip
        RolloutWatch.objects.bulk_create(
            RolloutWatch(
                rollout=rollout, environment="word-problems", version=rollout.newest_version, tokens=20, tool_calls=2,
                tool_errors=luck.randint(0, 1), no_edit=None, refusal=False, gap=None, impossible_passed=None,
                tests_touched=luck.random() < rate, special_cased=False, early_exit=False, tampering=False,
                turns=[[10, 2, 0], [10, 0, 0]],
            )
            for rollout in rollouts
        )  # fmt: skip
    move_head(run, max(rates) + 2)
    return run


def move_head(run: Run, number: int) -> None:
    run.lineage.head = version(run, number)
    run.lineage.save(update_fields=["head"])


def test_a_sign_that_rises_calls_a_person_once():
    run = watched_run({1: 0.0, 2: 0.0, 3: 0.3, 4: 0.3})
    assert run in runs_watched()
    (alert,) = run_watch(run)
    assert (alert.kind, alert.detail["sign"], alert.detail["environment"]) == (
        AlertKind.CHEATING, "tests_touched", "word-problems",
    )  # fmt: skip
    assert alert.detail["before"] == 0
    assert alert.detail["now"] == pytest.approx(0.3, abs=0.1)
    assert alert.detail["p"] < 0.01 / len(Sign)
    assert run_watch(run) == []
    alert_resolve(alert=alert, user=None, actor=TESTER, reason="it was the tests' own names")
    assert run_watch(run) == []
    assert Alert.objects.count() == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_rate_that_stays_calls_nobody(seed):
    assert run_watch(watched_run(dict.fromkeys(range(1, 7), 0.1), seed=seed)) == []


def test_versions_whose_rollouts_may_still_come_wait():
    run = watched_run({1: 0.0, 2: 0.0, 3: 0.3, 4: 0.3})
    for head in (4, 5):  # the bound is one version
        move_head(run, head)
        assert run_watch(run) == []
    move_head(run, 6)
    assert len(run_watch(run)) == 1


def test_evaluations_are_not_compared_with_training():
    run = watched_run({1: 0.0, 2: 0.0, 3: 0.3, 4: 0.3})
    RolloutGroup.objects.filter(rollouts__newest_version__number__gte=3).update(purpose=GroupPurpose.EVALUATION)
    assert run_watch(run) == []
    RolloutGroup.objects.filter(draw__gte=400).update(purpose=GroupPurpose.TRAIN)
    RolloutGroup.objects.filter(draw__lt=200).update(purpose=GroupPurpose.EVALUATION)
    assert run_watch(run) == [], "of each side half is left, which is too little"


def test_few_rollouts_call_nobody():
    assert run_watch(watched_run({1: 0.0, 2: 0.9}, each=40)) == []


def test_a_sign_that_falls_calls_nobody():
    assert run_watch(watched_run({1: 0.3, 2: 0.3, 3: 0.0, 4: 0.0})) == []


def test_shares_are_by_version_newest_first():
    run = watched_run({1: 0.0, 2: 1.0}, each=16)
    newest, first = signs_by_version(run.project, "word-problems")
    assert (newest.version.number, first.version.number) == (2, 1)
    assert (newest.rollouts, newest.shares[Sign.TESTS_TOUCHED].value) == (16, 1.0)
    assert first.shares[Sign.TESTS_TOUCHED].value == 0.0
    assert newest.shares[Sign.GAP].value is None
    assert newest.shares[Sign.TOOL_ERRORS].count == 32
    assert signs_by_version(run.project, "code-repair") == []
    assert signs_by_version(make_run().project, "word-problems") == []


@pytest.mark.parametrize(
    ("values", "reference", "gap", "impossible"),
    [
        ({}, {}, None, None),
        ({CriterionKind.TEST_GAP: 0.4, CriterionKind.IMPOSSIBLE_PASSED: 0.0}, {}, 0.4, None),
        ({CriterionKind.VISIBLE_TESTS: 1.0, CriterionKind.HIDDEN_TESTS: 0.0}, {}, 1.0, None),
        ({CriterionKind.VISIBLE_TESTS: 1.0, CriterionKind.HIDDEN_TESTS: 0.625}, {}, 0.0, None),
        ({CriterionKind.IMPOSSIBLE_PASSED: 1.0}, {"impossible": True}, None, True),
        ({CriterionKind.IMPOSSIBLE_PASSED: 0.0}, {"impossible": True}, None, False),
    ],
)
def test_what_criteria_watched_is_kept_with_the_rollout(values, reference, gap, impossible):
    run = make_run()
    group = make_group(run)
    group.task.reference = reference
    rollout = Rollout.objects.create(
        group=group, attempt=0, state=RolloutState.SCORED, reward=0.5, newest_version=run.lineage.head
    )
    rollout_note(group=group, rollout=rollout, values=values, signs=QUIET)
    row = RolloutWatch.objects.get()
    assert (row.gap, row.impossible_passed, row.environment) == (gap, impossible, "word-problems")
    tally = group.task.tallies.get()
    assert (tally.attempts, tally.passes, tally.rewards, tally.squares) == (1, 0, 0.5, 0.25)


def test_without_production_there_is_nothing_to_compare():
    run = watched_run({1: 0.0}, each=8)
    assert simulation_against_production("word-problems", version(run, 1)) == []


def test_a_version_that_behaves_otherwise_with_users_is_told_from_one_that_does_not():
    run = watched_run({1: 0.0}, each=120)
    lane = Lane.objects.create(
        project=run.project, slug="lane", cluster=Cluster.objects.filter(project=run.project).first(),
        model=run.lineage.model, salt="salt",
    )  # fmt: skip
    luck = random.Random(3)
    Generation.objects.bulk_create(
        Generation(
            lane=lane, version=version(run, 1), prompt_tokens=5, sampled_tokens=10, finish_reason="stop",
            latency_ms=1.0,
            behaviour={
                "tokens": 10, "tool_calls": 2 * (n % 2), "refusal": luck.random() < 0.5,
            },
        )
        for n in range(150)
    )  # fmt: skip
    seen = watch_of(run.project, "word-problems")
    assert seen.compared_version == version(run, 1)
    found = {row.key: row.found for row in seen.compared}
    # every second turn makes two calls, and so does every second answer: averages of rollouts would not show it
    assert (found["tokens"].effect, found["tool_calls"].effect) == (0.0, 0.0)
    assert found["refusal"].effect > 0.35
    assert found["refusal"].p < 1e-6
